"""What eviction and renumbering leave is exactly what a fresh evaluation of the kept tokens gives.

In a model of one layer the keys and values of a token depend on that token alone, and RoPE is relative: so
after evicting, the logits that follow equal those of a fresh context that was only given the kept tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import ROTATED, WINDOWED, evict_positions, kl, opened, policy_of, random_tokens
from tiny_models import build

from h2o_gguf.policies import make

TOKENS = random_tokens(120)
F32 = {"type_k": "f32", "type_v": "f32", "attention": "fused", "budget": 0}


@pytest.mark.parametrize("arch", ROTATED)
def test_a_suffix_alone_equals_a_fresh_evaluation(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf", n_layer=1)
    with opened(path, **F32) as fresh:
        expected = fresh.feed(TOKENS[40:], 20)[-20:]
    with opened(path, **F32) as run:
        run.feed(TOKENS[:100], 20)
        evict_positions(run, list(range(40)))
        got = run.feed(TOKENS[100:], 20)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("chunk", [1, 7, 20])
@pytest.mark.parametrize("arch", ["llama", "deepseek2"])
def test_batches_after_an_eviction_see_the_same_mask(arch: str, chunk: int, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf")
    results = []
    for size in (1, chunk):
        with opened(path, **F32) as run:
            run.feed(TOKENS[:100], 20)
            evict_positions(run, list(range(3, 60, 2)))
            results.append(run.feed(TOKENS[100:], size))
    assert np.abs(results[0] - results[1]).max() < 1e-4 * np.abs(results[0]).max()


@pytest.mark.parametrize("arch", [*ROTATED, *WINDOWED, "jamba"])
def test_renumbering_changes_nothing_where_no_gap_is_closed(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf", n_layer=2)
    results = []
    for rebase in (False, True):
        with opened(path, n_ctx=512, **F32) as run:
            run.feed(TOKENS[:90], 20)
            evict_positions(run, list(range(30)))
            if rebase:
                assert (run.cache.rope_pos[run.cache.pos >= 0] == run.cache.pos[run.cache.pos >= 0]).all()
                run.cache.rebase()
                used = run.cache.pos >= 0
                assert (run.cache.rope_pos[used] == run.cache.pos[used] - 30).all()
            results.append(run.feed(TOKENS[90:], 10))
            assert run.cache.n_past() == 120, "positions of the sequence go on"
    # Turning a float32 key by 120 radians and back costs a few 1e-6; llama.cpp's attention in the window
    # layers rounds keys to float16 (2^-11).
    tolerance = 2e-3 if arch in WINDOWED else 2e-4
    assert np.abs(results[0] - results[1]).max() < tolerance * np.abs(results[0]).max()


@pytest.mark.parametrize("arch", ROTATED)
def test_closing_gaps_equals_a_fresh_evaluation_of_the_kept(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf", n_layer=1)
    gone = [*range(3, 60, 2), 70, 71, 72]
    kept = [t for i, t in enumerate(TOKENS[:100]) if i not in gone]
    with opened(path, **F32) as fresh:
        expected = fresh.feed(kept + TOKENS[100:], 20)[-20:]
    with opened(path, **F32) as run:
        run.feed(TOKENS[:100], 20)
        evict_positions(run, gone)
        run.cache.rebase()
        got = run.feed(TOKENS[100:], 20)
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("cache_type", ["f16", "bf16", "q8_0", "q5_1", "q4_0", "iq4_nl"])
def test_renumbered_keys_of_every_type_are_the_rotated_ones(cache_type: str, tmp_path: Path) -> None:
    """Against keys that were computed at the new positions, within one more rounding to the cache's type."""
    path = build("llama", tmp_path / "m.gguf", n_layer=1)
    with opened(path, type_k=cache_type, budget=0) as fresh:
        fresh.feed(TOKENS[40:100], 20)
        expected = fresh.cache.keys(0)[:, :60]
    with opened(path, type_k=cache_type, budget=0) as run:
        run.feed(TOKENS[:100], 20)
        evict_positions(run, list(range(40)))
        before = run.cache.keys(0)[:, 40:100]
        run.cache.rebase()
        got = run.cache.keys(0)[:, 40:100]
    step = {"f16": 2**-10, "bf16": 2**-7, "q8_0": 0.015, "q5_1": 0.08, "q4_0": 0.16, "iq4_nl": 0.16}[
        cache_type
    ]
    error = np.abs(got - expected).max() / np.abs(expected).max()
    assert error < 2 * step
    assert np.abs(before - expected).max() > 0.5 * np.abs(expected).max(), "they were turned at all"


def test_learned_positions_are_refused_past_the_trained_context(tmp_path: Path) -> None:
    path = build("gpt2", tmp_path / "m.gguf", n_ctx_train=128)
    with opened(path, n_ctx=256, n_ubatch=32, budget=64, block=8) as run:
        policy_of(run, make("streaming", 64))
        run.feed(TOKENS[:96] + TOKENS[:32], 32)
        code, _ = run.try_decode(TOKENS[:1])
        assert code == -100
        with pytest.raises(Exception, match="learned"):
            run.cache.rebase()
        assert run.remove(-1)
        run.decode(TOKENS[:8])


@pytest.mark.parametrize("arch", [*ROTATED, *WINDOWED, "lfm2", "smollm3"])
def test_positions_go_on_past_the_trained_context(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf", n_ctx_train=128)
    with opened(path, n_ctx=512, n_ubatch=32, budget=64, block=8) as run:
        policy_of(run, make("streaming", 64))
        tokens = random_tokens(900, seed=5)
        logits = run.feed(tokens, 25)
        assert np.isfinite(logits).all()
        assert run.cache.n_rebases >= 5
        assert run.cache.n_past() == 900
        assert run.cache.rope_pos.max() < 128
        assert run.cache.pos.max() == 899
        assert {0, 1, 2, 3} <= set(run.cache.pos[0, 0].tolist()), "sinks are still there"


def test_a_model_without_positions_is_never_renumbered(tmp_path: Path) -> None:
    path = build("jamba", tmp_path / "m.gguf", n_ctx_train=128)
    with opened(path, n_ctx=512, n_ubatch=32, budget=64, block=8) as run:
        policy_of(run, make("streaming", 64))
        assert np.isfinite(run.feed(random_tokens(300), 25)).all()
        assert run.cache.n_rebases == 0


@pytest.mark.parametrize("arch", ["llama", "phi3-longrope", "gemma3", "deepseek2", "qwen2vl"])
def test_a_run_renumbered_often_follows_one_never_renumbered(arch: str, tmp_path: Path) -> None:
    """Positions with gaps and renumbered ones differ, so only a plain window (no sinks) can be compared."""
    path = build(arch, tmp_path / "m.gguf", n_ctx_train=4096)
    tokens = random_tokens(500, seed=9)
    results = []
    for n_pos_max in (4000, 110):
        with opened(
            path, n_ctx=512, n_ubatch=32, type_k="f32", type_v="f32", budget=64, block=8, n_pos_max=n_pos_max
        ) as run:
            policy_of(run, make("streaming", 64, n_sink=0, n_recent=48))
            results.append(run.feed(tokens, 16))
            assert run.cache.n_rebases == 0 if n_pos_max == 4000 else run.cache.n_rebases > 5
    assert kl(results[0], results[1]).max() < 1e-4
