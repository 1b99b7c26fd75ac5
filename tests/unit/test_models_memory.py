"""KV bytes: closed forms, and equal to what the native library allocates."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from harness import random_tokens
from llama_harness import open_tiny
from tiny_models import ARCHITECTURES, build
from tiny_models.headers import header
from tiny_models.native import context, library, logged_sizes, model

from h2o_gguf.errors import OptionError
from h2o_gguf.models.catalog import CATALOG, path
from h2o_gguf.models.memory import (
    CACHE_TYPES,
    MemoryBytes,
    entry_bytes,
    kv_bytes,
    memory_bytes,
    pad_cells,
    type_problem,
)
from h2o_gguf.models.shape import read_shape, shape_of

MIB = 1 << 20


@pytest.mark.parametrize(("n", "padded"), [(1, 256), (255, 256), (256, 256), (257, 512), (8192, 8192)])
def test_cells_are_padded_to_256(n: int, padded: int) -> None:
    assert pad_cells(n) == padded


def test_plain_cache_is_cells_times_layers_times_heads_times_sizes() -> None:
    shape = shape_of(header("llama"))  # 12 layers, 2 KV heads of 64
    assert kv_bytes(shape, 1000) == 1024 * 12 * 2 * (64 + 64) * 2
    assert kv_bytes(shape, 1024, type_k="f32", type_v="f16") == 1024 * 12 * 2 * (64 * 4 + 64 * 2)


# Bytes per 32 values, from ggml's block layouts: scale(s) and packed values.
@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [("q8_0", 34), ("q5_0", 22), ("q5_1", 24), ("q4_0", 18), ("q4_1", 20), ("iq4_nl", 18), ("bf16", 64)],
)
def test_bytes_of_each_type(name: str, n_bytes: int) -> None:
    shape = shape_of(header("llama"))
    assert kv_bytes(shape, 256, type_k=name, type_v=name) == 256 * 12 * 2 * 2 * 2 * n_bytes


def test_windowed_layers_keep_window_and_ubatch() -> None:
    shape = shape_of(header("gemma2", attention__sliding_window=1024))  # 6 windowed, 6 full
    per_cell = 2 * 128 * 2
    part = memory_bytes(shape, 4096, 512)
    assert part.full == 4096 * 6 * per_cell
    assert (part.window, part.n_cells_window) == (1536 * 6 * per_cell, 1536)
    assert memory_bytes(shape, 512, 512).n_cells_window == 512, "never more than the full layers have"
    assert memory_bytes(shape, 4096, swa_full=True).n_cells_window == 4096


def test_layers_with_cells_of_their_own_are_counted_with_them() -> None:
    shape = shape_of(header("gemma2", attention__sliding_window=1024))  # every second of 12 layers has none
    per_cell = 2 * 128 * 2
    part = memory_bytes(shape, 4096, 512, layer_cells=[77, 600, 77, 0, 77, 256] + [77, 100] * 3)
    assert part.full == (768 + 4096 + 256 + 3 * 256) * per_cell
    assert part.window == memory_bytes(shape, 4096, 512).window, "windowed layers ignore theirs"


def test_recurrent_state_is_counted_apart(tmp_path: Path) -> None:
    part = memory_bytes(read_shape(build("jamba", tmp_path / "m.gguf")), 256)
    assert part.kv == 256 * 2 * 128 * 2
    assert part.state == 4 * (3 * 512 + 16 * 512)  # convolution and state of one layer
    assert part.total == part.kv + part.state


def test_transposed_v_is_as_wide_as_the_widest() -> None:
    shape = shape_of(header("openelm", block_count=2, attention__head_count_kv=(2, 4)))
    assert memory_bytes(shape, 256).kv == 256 * (2 + 4) * (64 + 64) * 2
    assert memory_bytes(shape, 256, flash_attn=False).kv == 256 * ((2 + 4) * 64 + 2 * 4 * 64) * 2


def test_unknown_type_is_refused_with_the_choices() -> None:
    with pytest.raises(OptionError, match=r"q3_k.*choose one of f32"):
        kv_bytes(shape_of(header("llama")), 256, type_k="q3_k")


def test_quantized_v_without_flash_attention_names_both_options() -> None:
    problem = type_problem(shape_of(header("llama")), "f16", "q8_0", flash_attn=False)
    assert "cache-type-v" in problem and "flash-attn" in problem


def test_heads_that_do_not_fill_a_block_are_refused() -> None:
    shape = shape_of(header("llama", attention__key_length=80, attention__value_length=64))
    assert "packs 32 values" in type_problem(shape, "q8_0", "f16")
    assert type_problem(shape, "f16", "q8_0") == ""


def test_latent_cache_wants_equal_types(tmp_path: Path) -> None:
    shape = read_shape(build("deepseek2", tmp_path / "m.gguf"))
    assert "must be equal" in type_problem(shape, "q8_0", "f16")
    assert kv_bytes(shape, 256) == 256 * 2 * 192 * 2


@pytest.mark.parametrize("n_cells", [0, -1])
def test_illegal_sizes_are_refused(n_cells: int) -> None:
    with pytest.raises(OptionError, match="at least 1"):
        kv_bytes(shape_of(header("llama")), n_cells)


def native() -> None:
    lib, why = library()
    if lib is None:
        pytest.skip(why)


# llama.cpp prints MiB with two decimals: at 2^20 cells that is every byte of a cell.
RUNS = [
    (1 << 20, 512, "f16", "f16"),
    (1 << 20, 512, "q8_0", "q4_0"),
    (1 << 20, 512, "iq4_nl", "iq4_nl"),
    (300, 64, "f32", "f32"),
    (10_000, 700, "bf16", "q5_1"),
    (5_000, 2048, "q5_0", "q4_1"),
]


def check_against_the_library(file: Path) -> None:
    shape = read_shape(file)
    with model(file, no_alloc=True) as loaded:
        for n_ctx, n_ubatch, type_k, type_v in RUNS:
            if type_problem(shape, type_k, type_v):
                continue
            for swa_full in (False, True) if shape.n_swa else (False,):
                ours = memory_bytes(shape, n_ctx, n_ubatch, type_k, type_v, swa_full=swa_full)
                with context(
                    loaded,
                    n_ctx=n_ctx,
                    n_ubatch=n_ubatch,
                    type_k=gguf.GGMLQuantizationType[type_k.upper()].value,
                    type_v=gguf.GGMLQuantizationType[type_v.upper()].value,
                    swa_full=swa_full,
                ) as (_, log):
                    compare(logged_sizes(log), ours)


def compare(sizes: list[tuple[str, int, float, float]], ours: MemoryBytes) -> None:
    want = [(ours.n_cells, ours.full), (ours.n_cells_window, ours.window)]
    want = [(cells, n_bytes) for cells, n_bytes in want if n_bytes]
    caches = [(cells, k + v) for kind, cells, k, v in sizes if kind == "llama_kv_cache"]
    assert caches == [(cells, pytest.approx(n_bytes / MIB, abs=0.0101)) for cells, n_bytes in want]
    state = sum(r + s for kind, _, r, s in sizes if kind == "llama_memory_recurrent")
    assert state == pytest.approx(ours.state / MIB, abs=0.0101)


@pytest.mark.parametrize("arch", [name for name, want in ARCHITECTURES.items() if want.is_generative])
def test_bytes_equal_what_the_library_allocates(arch: str, tmp_path: Path) -> None:
    native()
    check_against_the_library(build(arch, tmp_path / "m.gguf", n_layer=2))


@pytest.mark.parametrize("name", CATALOG)
def test_bytes_of_catalog_models_equal_what_the_library_allocates(name: str) -> None:
    native()
    if not path(name).is_file():
        pytest.skip(f"{name} is not here; fetch it with: h2o-gguf models fetch {name}")
    check_against_the_library(path(name))


def test_every_cache_type_is_one_the_library_has() -> None:
    assert set(CACHE_TYPES) <= {kind.name.lower() for kind in gguf.GGMLQuantizationType}


@pytest.mark.parametrize("arch", ["llama", "gemma3", "jamba", "deepseek2"])
def test_an_attic_grows_by_the_bytes_of_its_entries(arch: str, tmp_path: Path) -> None:
    """Room is made for 256 of each head at a time."""
    with open_tiny(arch, tmp_path, kv_budget=40, n_batch=16, kv_block=8, attic="ram") as llm:
        llm.engine.prefill(random_tokens(190))
        kept = llm.engine.report().attic
        n_bytes = entry_bytes(read_shape(llm.model_path))
    assert kept.entries == 150 and n_bytes > 0
    assert kept.bytes == 256 * n_bytes
