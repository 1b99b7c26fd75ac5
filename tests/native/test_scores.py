"""Attention scores: all ways of computing them agree, on every architecture; their sum is what it must be."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import kl, opened, random_tokens
from tiny_models import ARCHITECTURES, build

EVICTABLE = [name for name, expected in ARCHITECTURES.items() if expected.evicts]
N = 96
TOKENS = random_tokens(N)


@pytest.mark.parametrize("arch", EVICTABLE)
def test_fused_and_composed_scores_equal_the_reference(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf")
    scores, logits = {}, {}
    for attention in ("reference", "fused", "composed"):
        with opened(
            path, n_ctx=1024, type_k="f32", type_v="f32", budget=0, attention=attention, decay=0.99
        ) as run:
            logits[attention] = np.concatenate([run.feed(TOKENS[:-5], 40), run.feed(TOKENS[-5:], 1)])
            scores[attention] = run.cache.scores.copy()
            used = run.cache.pos >= 0
    scale = scores["reference"].max()
    # llama.cpp's own flash attention casts float32 keys to float16 (2^-11); deeper layers see the difference.
    np.testing.assert_allclose(scores["fused"], scores["reference"], atol=2e-4 * scale)
    np.testing.assert_allclose(scores["composed"], scores["reference"], atol=2e-2 * scale)
    assert kl(logits["reference"], logits["fused"]).max() < 1e-5
    assert kl(logits["reference"], logits["composed"]).max() < 2e-2
    assert (scores["fused"][~used] == 0).all()


@pytest.mark.parametrize("decay", [1.0, 0.9])
@pytest.mark.parametrize("attention", ["fused", "composed", "reference"])
def test_mass_is_one_per_query_and_head_faded_per_token(attention: str, decay: float, tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with opened(path, budget=0, attention=attention, decay=decay) as run:
        run.feed(TOKENS[:50], 20)
        run.feed(TOKENS[50:60], 1)
        # Each query gives a mass of 1 per head: G to a KV head of G query heads, G decay^t after t tokens.
        n_group = 2
        expected = n_group * sum(decay**t for t in range(60))
        np.testing.assert_allclose(run.cache.scores.sum(-1), expected, rtol=1e-4)


def test_query_weights_count_for_one_batch(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with opened(path, budget=0, attention="fused") as run:
        run.cache.set_query_weights(np.array([0, 0, 0.5, 2], np.float32))
        run.decode(TOKENS[:4])
        np.testing.assert_allclose(run.cache.scores.sum(-1), 2 * 2.5, rtol=1e-5)
        run.decode(TOKENS[4:8])
        np.testing.assert_allclose(run.cache.scores.sum(-1), 2 * (2.5 + 4), rtol=1e-5)


def test_one_query_sees_only_itself_at_first(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with opened(path, budget=0, attention="fused") as run:
        run.decode(TOKENS[:1])
        assert (run.cache.scores[..., 0] == 2).all(), "softmax over one entry is 1, for both query heads"
        assert run.cache.scores.sum() == 2 * run.cache.n_layer * run.cache.n_head_kv


def test_composed_attention_without_scores_is_llama_cpps_own(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with opened(path) as bare:
        expected = bare.feed(TOKENS, 32)
    with opened(path, budget=0, attention="composed", is_scored=False) as run:
        assert np.array_equal(run.feed(TOKENS, 32), expected)
        assert not run.cache.scores.any()


@pytest.mark.parametrize("attention", ["auto", "fused", "composed", "reference"])
def test_scores_cost_no_bit_of_the_logits(attention: str, tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    logits = []
    for is_scored in (True, False):
        with opened(path, budget=0, attention=attention, is_scored=is_scored) as run:
            logits.append(np.concatenate([run.feed(TOKENS[:40], 32), run.feed(TOKENS[40:48], 1)]))
            assert run.cache.scores.any() == is_scored
    assert np.array_equal(*logits)


def test_composed_scores_leave_the_logits_as_they_are(tmp_path: Path) -> None:
    path = build("qwen2", tmp_path / "m.gguf")
    with opened(path) as bare:
        expected = bare.feed(TOKENS, 32)
    with opened(path, budget=0, attention="composed") as run:
        assert np.array_equal(run.feed(TOKENS, 32), expected)


@pytest.mark.parametrize(
    "cache_type", ["f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl"]
)
def test_every_cache_type_scores_like_the_reference(cache_type: str, tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf", n_layer=1)
    scores = {}
    for attention in ("reference", "fused"):
        with opened(path, type_k=cache_type, type_v=cache_type, budget=0, attention=attention) as run:
            run.feed(TOKENS, 33)
            scores[attention] = run.cache.scores.copy()
    np.testing.assert_allclose(scores["fused"], scores["reference"], atol=1e-4 * scores["reference"].max())


def test_transposed_values_without_flash_attention(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with opened(path, flash=False, type_k="f32", type_v="f32") as bare:
        expected = bare.feed(TOKENS, 32)
    for attention in ("fused", "reference"):
        with opened(path, flash=False, type_k="f32", type_v="f32", budget=0, attention=attention) as run:
            assert kl(expected, run.feed(TOKENS, 32)).max() < 1e-5
