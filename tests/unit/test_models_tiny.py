"""The tiny models themselves: they load, decode, and their output depends on the past."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_models import ARCHITECTURES, build
from tiny_models.native import embedding, library, logits

TOKENS = [1, *(3 + byte for byte in b"tiny models")]
EARLY = [*TOKENS[:2], 3 + ord("q"), *TOKENS[3:]]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_unmodified_llama_cpp_decodes_it(arch: str, tmp_path: Path) -> None:
    lib, why = library()
    if lib is None:
        pytest.skip(why)
    path = build(arch, tmp_path / "m.gguf")
    if not ARCHITECTURES[arch].is_generative:
        first, second = embedding(path, TOKENS, 256), embedding(path, EARLY, 256)
        assert np.isfinite(first).all() and np.abs(first - second).max() > 1e-3
        return
    first, second = logits(path, TOKENS), logits(path, EARLY)
    assert np.isfinite(first).all()
    assert np.array_equal(first[:2], second[:2]), "equal until the changed token"
    assert np.abs(first[-1] - second[-1]).max() > 1e-3, "an early token matters"
    assert first[-1].std() > 0.5, "not flat"
    q8_0 = 8
    assert np.isfinite(logits(path, TOKENS, type_k=q8_0, type_v=q8_0)).all()


@pytest.mark.parametrize("arch", [name for name, want in ARCHITECTURES.items() if want.min_layers == 1])
def test_one_layer_is_enough_for_oracles(arch: str, tmp_path: Path) -> None:
    lib, why = library()
    if lib is None:
        pytest.skip(why)
    path = build(arch, tmp_path / "m.gguf", n_layer=1)
    if ARCHITECTURES[arch].is_generative:
        assert np.isfinite(logits(path, TOKENS)).all()


def test_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first = build("llama", tmp_path / "a.gguf", seed=3).read_bytes()
    assert first == build("llama", tmp_path / "b.gguf", seed=3).read_bytes()
    assert first != build("llama", tmp_path / "c.gguf", seed=4).read_bytes()
