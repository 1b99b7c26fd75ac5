"""Shapes: layers, windows, heads and RoPE as llama.cpp derives them from the same metadata."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import build
from tiny_models.headers import header

from h2o_gguf.errors import ModelFileError
from h2o_gguf.models.shape import ModelShape, read_shape, shape_of


def windowed(shape: ModelShape) -> list[int]:
    return [il for il, is_windowed in enumerate(shape.swa_layers) if is_windowed]


def test_sizes_of_a_plain_model(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf", n_layer=3, n_ctx_train=512, chat_template="{{ x }}")
    shape = read_shape(path)
    assert (shape.architecture, shape.name) == ("llama", "tiny llama")
    assert (shape.n_layer, shape.n_embd, shape.n_ctx_train, shape.n_vocab) == (3, 256, 512, 263)
    assert shape.n_head == (4, 4, 4) and shape.n_head_kv == (2, 2, 2)
    assert (shape.head_dim_k, shape.head_dim_v) == (64, 64)
    assert shape.memory == "kv" and shape.attention_layers == shape.full_layers == (0, 1, 2)
    assert (shape.rope, shape.n_rot, shape.rope_offset) == ("norm", 64, 0)
    assert shape.file_type == "f32" and shape.has_chat_template
    assert shape.n_file_bytes == path.stat().st_size


def test_kv_heads_default_to_heads() -> None:
    assert shape_of(header("llama", attention__head_count_kv=None)).n_head_kv == (8,) * 12


def test_heads_may_differ_per_layer() -> None:
    shape = shape_of(header("openelm", block_count=3, attention__head_count_kv=(2, 4, 8)))
    assert shape.n_head_kv == (2, 4, 8)


def test_key_and_value_length_override_the_quotient() -> None:
    shape = shape_of(header("qwen3", attention__key_length=128, attention__value_length=96))
    assert (shape.head_dim_k, shape.head_dim_v) == (128, 96)


# Rules read from llama.cpp's model code; the arrays are the window layers of the first layers.
@pytest.mark.parametrize(
    ("arch", "keys", "n_swa", "layers"),
    [
        ("gemma2", {}, 4096, [0, 2, 4, 6, 8, 10]),
        ("gemma2", {"attention__sliding_window": 64}, 64, [0, 2, 4, 6, 8, 10]),
        ("gemma3", {}, 0, []),
        ("gemma3", {"attention__sliding_window": 512}, 512, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]),
        ("gpt-oss", {"attention__sliding_window": 128}, 128, [0, 2, 4, 6, 8, 10]),
        ("cohere2", {"attention__sliding_window": 4096}, 4096, [0, 1, 2, 4, 5, 6, 8, 9, 10]),
        ("cohere2moe", {"attention__sliding_window": 64}, 64, [1, 2, 3, 5, 6, 7, 9, 10, 11]),
        ("llama4", {}, 8192, [0, 1, 2, 4, 5, 6, 8, 9, 10]),
        ("llama4", {"attention__sliding_window": 0}, 0, []),
        ("phi3", {"attention__sliding_window": 2047}, 0, []),
        ("exaone4", {"attention__sliding_window": 4096}, 0, []),
        ("smallthinker", {"attention__sliding_window": 77}, 4096, [1, 2, 3, 5, 6, 7, 9, 10, 11]),
        ("llama", {"attention__sliding_window": 4096}, 0, []),
        (
            "gemma3",
            {"attention__sliding_window": 8, "attention__sliding_window_pattern": 3},
            8,
            [0, 1, 3, 4, 6, 7, 9, 10],
        ),
        (
            "gemma4",
            {"attention__sliding_window": 8, "attention__sliding_window_pattern": (True,) * 5 + (False,) * 7},
            8,
            [0, 1, 2, 3, 4],
        ),
    ],
)
def test_windowed_layers(arch: str, keys: dict[str, object], n_swa: int, layers: list[int]) -> None:
    shape = shape_of(header(arch, **keys))
    assert shape.n_swa == n_swa
    assert windowed(shape) == layers
    assert shape.memory == ("iswa" if layers else "kv")


def test_window_pattern_must_be_given_where_llama_cpp_demands_it() -> None:
    with pytest.raises(ModelFileError, match="sliding_window_pattern"):
        shape_of(header("mimo2", attention__sliding_window=64))
    with pytest.raises(ModelFileError, match="pattern has 2 entries for 12 layers"):
        shape_of(
            header("mimo2", attention__sliding_window=64, attention__sliding_window_pattern=(True, False))
        )


@pytest.mark.parametrize(
    ("arch", "keys", "attention"),
    [
        ("jamba", {"attention__head_count_kv": (0, 0, 0, 2) * 3}, (3, 7, 11)),
        ("granitehybrid", {"attention__head_count_kv": (0, 0, 2) * 4}, (2, 5, 8, 11)),
        ("lfm2", {"attention__head_count_kv": (0, 2) * 6, "shortconv__l_cache": 3}, (1, 3, 5, 7, 9, 11)),
        ("falcon-h1", {}, tuple(range(12))),
        ("qwen3next", {}, (3, 7, 11)),
        ("qwen3next", {"full_attention_interval": 6}, (5, 11)),
        ("minimax-01", {}, (7,)),
        (
            "nemotron_h",
            {
                "attention__head_count_kv": (0, 0, 2) * 4,
                "feed_forward_length": (0, 64, 0) * 4,
            },
            (2, 5, 8, 11),
        ),
    ],
)
def test_hybrids_cache_their_attention_layers(
    arch: str, keys: dict[str, object], attention: tuple[int, ...]
) -> None:
    shape = shape_of(header(arch, **keys))
    assert shape.memory == "hybrid"
    assert shape.attention_layers == attention
    if arch == "falcon-h1":
        assert all(shape.recurrent_layers)
    if arch == "nemotron_h":
        assert [il for il, is_recurrent in enumerate(shape.recurrent_layers) if is_recurrent] == [0, 3, 6, 9]


def test_layers_for_multi_token_prediction_are_not_of_the_trunk() -> None:
    shape = shape_of(header("glm4moe", block_count=12, nextn_predict_layers=1))
    assert (shape.n_layer, shape.n_layer_all) == (11, 12)
    assert shape.full_layers == tuple(range(11))


def test_looped_layers_each_have_a_cache() -> None:
    shape = shape_of(header("nanbeige", block_count=4, num_loops=3))
    assert shape.n_layer == 12 and len(shape.n_head_kv) == 12


@pytest.mark.parametrize(
    ("arch", "keys", "rope"),
    [
        ("llama", {}, "norm"),
        ("qwen2", {}, "neox"),
        ("qwen2vl", {}, "mrope"),
        ("qwen3vl", {}, "imrope"),
        ("gpt2", {}, "none"),
        ("starcoder", {}, "none"),
        ("glm4", {}, "norm"),
        ("glm4", {"rope__dimension_sections": (8, 12, 12, 0)}, "mrope"),
        ("glm4moe", {"rope__dimension_sections": (0, 0, 0, 0)}, "neox"),
    ],
)
def test_rope_kind(arch: str, keys: dict[str, object], rope: str) -> None:
    assert shape_of(header(arch, **keys)).rope == rope


@pytest.mark.parametrize(
    ("arch", "keys", "without"),
    [
        ("llama", {}, []),
        ("smollm3", {}, [3, 7, 11]),
        ("cohere2", {"attention__sliding_window": 64}, [3, 7, 11]),
        ("llama4", {}, [3, 7, 11]),
        ("granite", {"rope__scaling__finetuned": False}, list(range(12))),
        ("jamba", {"attention__head_count_kv": (0, 2) * 6}, list(range(12))),
    ],
)
def test_layers_without_rope(arch: str, keys: dict[str, object], without: list[int]) -> None:
    shape = shape_of(header(arch, **keys))
    assert [il for il, has_rope in enumerate(shape.rope_layers) if not has_rope] == without


def test_latent_cache_has_no_v_and_rotates_the_end_of_a_key(tmp_path: Path) -> None:
    shape = read_shape(build("deepseek2", tmp_path / "m.gguf"))
    assert shape.is_mla
    assert shape.head_dims(0) == (192, 0) and shape.n_head_kv == (1, 1)
    assert (shape.rope_offset, shape.n_rot) == (128, 64)
    older = read_shape(build("deepseek2-mha", tmp_path / "older.gguf"))
    assert not older.is_mla
    assert older.head_dims(0) == (128, 64) and (older.rope_offset, older.n_rot) == (64, 64)


def test_rope_scaling_and_factors_are_noticed(tmp_path: Path) -> None:
    yarn = read_shape(build("llama-yarn", tmp_path / "yarn.gguf"))
    assert (yarn.rope_scaling, yarn.n_ctx_orig) == ("yarn", 64)
    factors = read_shape(build("llama-rope-factors", tmp_path / "factors.gguf"))
    assert factors.has_rope_factors and not factors.has_long_rope
    long = read_shape(build("phi3-longrope", tmp_path / "long.gguf"))
    assert long.has_rope_factors and long.has_long_rope
    partial = read_shape(build("gptneox", tmp_path / "partial.gguf"))
    assert (partial.n_rot, partial.head_dim_k) == (16, 64)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "context_length"])
def test_missing_size_is_named(key: str) -> None:
    with pytest.raises(ModelFileError, match=rf"lacks llama\.{key}"):
        shape_of(header("llama", **{key: None}))


def test_nonsense_sizes_are_refused() -> None:
    with pytest.raises(ModelFileError, match="block_count is 0"):
        shape_of(header("llama", block_count=0))
    with pytest.raises(ModelFileError, match="has 2 values for 12 layers"):
        shape_of(header("llama", attention__head_count_kv=(2, 2)))
    with pytest.raises(ModelFileError, match="not a number"):
        shape_of(header("llama", context_length="many"))
