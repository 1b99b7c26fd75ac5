"""The support matrix: every architecture is either evicted from or refused in words."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import ARCHITECTURES, build
from tiny_models.headers import header

from h2o_gguf.errors import UnsupportedModelError
from h2o_gguf.models.architectures import ARCHITECTURES as KNOWN
from h2o_gguf.models.shape import read_shape, shape_of
from h2o_gguf.models.support import require_support, support


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_verdict_on_each_tiny_model(arch: str, tmp_path: Path) -> None:
    want = ARCHITECTURES[arch]
    verdict = support(read_shape(build(arch, tmp_path / "m.gguf")))
    assert verdict.can_evict == want.evicts
    assert verdict.can_renumber == want.renumbers
    assert verdict.evicted_layers == want.layers
    assert want.says in verdict.reason and bool(verdict.reason) != want.evicts


@pytest.mark.parametrize("arch", sorted(KNOWN))
def test_every_architecture_has_a_verdict(arch: str) -> None:
    verdict = support(
        shape_of(
            header(
                arch,
                attention__sliding_window=64,
                attention__sliding_window_pattern=(True, False) * 6,
                attention__kv_lora_rank=32,
                attention__indexer__top_k=8,
            )
        )
    )
    assert verdict.can_evict == bool(verdict.evicted_layers)
    assert verdict.can_evict != bool(verdict.reason)


@pytest.mark.parametrize(
    ("arch", "keys", "says"),
    [
        ("mamba2", {}, "its state does not grow"),
        ("rwkv7", {}, "its state does not grow"),
        ("bert", {}, "encoder"),
        ("t5", {}, "encoder's output"),
        ("llada", {}, "diffusion"),
        ("eagle3", {}, "another model"),
        ("refact", {}, "ALiBi"),
        ("mpt", {"attention__max_alibi_bias": 8.0}, "ALiBi"),
        ("jais", {"attention__max_alibi_bias": 8.0}, "ALiBi"),
        ("baichuan", {"block_count": 40}, "ALiBi"),
        ("deepseek32", {}, "DSA"),
        ("glm-dsa", {}, "DSA"),
        ("deepseek4", {}, "DeepSeek V4"),
        ("minimax-m3", {}, "MSA"),
        ("glm5-next", {}, "indexer"),
        ("qwen4exp", {}, "indexer"),
        ("hy_v4", {"attention__indexer__top_k": 8}, "DSA"),
        ("graniteswitch", {}, "adapter"),
        ("gemma3n", {"block_count": 30, "attention__sliding_window": 512}, "first 20 of 30 layers"),
        ("openelm", {"attention__head_count_kv": (2, 4) * 6}, "different numbers of KV heads (2, 4)"),
        (
            "lfm2",
            {"attention__head_count_kv": (0, 2) * 6, "attention__sliding_window": 64},
            "every attention layer has a sliding window",
        ),
        ("llama", {"attention__causal": False}, "looks ahead"),
    ],
)
def test_refusals_say_why(arch: str, keys: dict[str, object], says: str) -> None:
    verdict = support(shape_of(header(arch, **keys)))
    assert not verdict.can_evict and says in verdict.reason


@pytest.mark.parametrize(
    ("arch", "keys"),
    [
        ("mpt", {}),
        ("baichuan", {"block_count": 32}),
        ("hy_v4", {}),
        ("qwen3vl", {}),
        ("falcon-h1", {}),
        ("qwen3next", {}),
    ],
)
def test_near_relatives_of_refused_models_are_evicted_from(arch: str, keys: dict[str, object]) -> None:
    assert support(shape_of(header(arch, **keys))).can_evict


def test_uneven_layers_do_not_matter_where_nothing_is_evicted() -> None:
    shape = shape_of(
        header(
            "gemma4",
            attention__sliding_window=64,
            attention__sliding_window_pattern=(True, True, False) * 4,
            attention__head_count_kv=(4, 4, 1) * 4,
            attention__key_length=512,
            attention__value_length=512,
            attention__key_length_swa=256,
            attention__value_length_swa=256,
        )
    )
    assert support(shape).evicted_layers == (2, 5, 8, 11)


def test_learned_positions_bound_the_text(tmp_path: Path) -> None:
    verdict = support(read_shape(build("gpt2", tmp_path / "m.gguf", n_ctx_train=128)))
    assert verdict.can_evict and not verdict.can_renumber and verdict.n_pos_max == 128
    assert any("ends at 128 tokens" in note for note in verdict.notes)


def test_two_sets_of_rope_factors_renumber_before_they_change(tmp_path: Path) -> None:
    assert support(read_shape(build("phi3-longrope", tmp_path / "l.gguf"))).n_pos_max == 64
    assert support(read_shape(build("phi3", tmp_path / "p.gguf"))).n_pos_max == 256


def test_windowed_layers_are_said_to_be_left_alone(tmp_path: Path) -> None:
    notes = support(read_shape(build("gemma3", tmp_path / "m.gguf", n_layer=6))).notes
    assert any(note.startswith("3 layers with a sliding window of 32 tokens") for note in notes)


def test_refusal_becomes_an_error_with_architecture_and_reason() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        require_support(shape_of(header("mamba")))
    assert caught.value.architecture == "mamba"
    assert "does not grow" in caught.value.reason and "mamba" in str(caught.value)
    assert require_support(shape_of(header("llama"))).can_evict
