"""Exact tokens attend to what stays in the attic as to what the cache holds: as if nothing were evicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attic_harness import EVICTED, N_UBATCH, ONLY_FLASH, recall_next, with_attic
from harness import TYPES, Run, opened, random_tokens
from numpy.typing import NDArray
from tiny_models import build

WITH_GELU = ("gpt2", "gptneox", "phi2", "gemma2", "gemma3")  # in llama.cpp a table of float16, which may flip
N_HISTORY, N_KEPT = 150, 40
FEW, MANY = 8, 30  # tokens that ask: the kernel's two forms
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "llama.gguf", n_ctx_train=4096)


def read_and_evict(run: Run, n_history: int = N_HISTORY) -> None:
    run.feed(random_tokens(n_history), N_UBATCH)
    for group in run.cache.groups:
        group.make_room(N_KEPT)
        assert group.attic.info().n_entry == n_history - N_KEPT


def errors(
    path: Path, n_asked: int = FEW, n_history: int = N_HISTORY, attic: dict[str, Any] | None = None,
    recall: dict[str, Any] | None = None, policy: str = "h2o+", **options: Any,
) -> tuple[float, float]:  # fmt: skip
    """How far the question's logits are off the full cache's, of the largest: exact, and not."""
    options = {"budget": n_history + 60, "n_ctx": 2 * n_history, **options}
    question = random_tokens(n_asked, seed=3)
    with opened(path, n_ubatch=N_UBATCH, block=8, **options) as run:
        run.feed(random_tokens(n_history), N_UBATCH)
        expected = run.decode(question)

    def error(n_exact: int) -> float:
        with with_attic(path, policy, attic=attic, **options) as run:
            read_and_evict(run, n_history)
            recall_next(run, n_exact=n_exact, **(recall or {}))
            return float(np.abs(run.decode(question) - expected).max() / np.abs(expected).max())

    return error(n_asked), error(0)


@pytest.mark.parametrize("n_most", [0, 12])
@pytest.mark.parametrize("n_asked", [FEW, MANY])
@pytest.mark.parametrize("arch", EVICTED)
def test_in_every_model(arch: str, n_asked: int, n_most: int, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf")
    exact, other = errors(path, n_asked, recall={"n_most": n_most}, type_k="f32", type_v="f32")
    assert exact < (5e-4 if arch in WITH_GELU else 1e-5) < 0.05 < other


@pytest.mark.parametrize("n_asked", [1, FEW, MANY])
@pytest.mark.parametrize("kind", TYPES)
def test_with_every_type_of_cache(kind: str, n_asked: int, model: Path) -> None:
    exact, other = errors(model, n_asked, type_k=kind, type_v=kind)
    assert exact < 1e-3 < 0.05 < other


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in ONLY_FLASH])
def test_where_values_lie_in_columns(kind: str, model: Path) -> None:
    exact, other = errors(model, type_k=kind, type_v=kind, flash=False)
    assert exact < 1e-3 < 0.05 < other


@pytest.mark.parametrize("alike", ["head", "layer"])
@pytest.mark.parametrize("attention", ["fused", "reference"])
def test_with_our_attentions_whoever_exchanges(attention: str, alike: str, model: Path) -> None:
    exact, other = errors(
        model, type_k="f32", type_v="f32", attention=attention, policy="streaming", recall={"alike": alike}
    )
    assert exact < 1e-5 < 0.05 < other


def test_in_an_attic_of_many_chunks_in_a_file(model: Path, tmp_path: Path) -> None:
    exact, other = errors(model, MANY, 2500, {"folder": tmp_path}, {"n_most": 20}, type_k="f32", type_v="f32")
    assert exact < 1e-5 < 0.01 < other


def test_rows_of_another_type_are_as_exact_as_that_type(model: Path) -> None:
    exact, other = errors(model, attic={"type_k": 8, "type_v": 8})
    assert 1e-6 < exact < 0.02 < 0.05 < other


def test_llama_cpps_own_attention_sees_the_cache_alone(model: Path) -> None:
    exact, other = errors(model, attention="composed")
    assert exact == other > 0.05


def test_the_last_of_a_batch_are_exact_in_the_first_layer_alone(tmp_path: Path) -> None:
    """Later layers attend to tokens before them that were not: with one layer, only those are off."""
    path = build("llama", tmp_path / "m.gguf", n_layer=1)
    question = random_tokens(MANY, seed=3)
    options = {"budget": N_HISTORY + 60, "n_ctx": 512, "type_k": "f32", "type_v": "f32"}
    with opened(path, n_ubatch=N_UBATCH, block=8, **options) as run:
        run.feed(random_tokens(N_HISTORY), N_UBATCH)
        expected = run.decode(question)
    with with_attic(path, **options) as run:
        read_and_evict(run)
        recall_next(run, n_most=0, n_exact=10)
        off = np.abs(run.decode(question) - expected).max(-1)
    assert off[-10:].max() < 1e-5 < 1e-2 < off[:-10].min()


@pytest.mark.parametrize("n_threads", [2, 5])
def test_whatever_the_number_of_threads(n_threads: int, model: Path) -> None:
    logits = []
    for n in (1, n_threads):
        with with_attic(model, budget=400, n_ctx=1024, n_threads=n) as run:
            read_and_evict(run, 300)
            recall_next(run, n_exact=MANY)
            logits.append(run.decode(random_tokens(MANY, seed=3)))
    assert np.array_equal(*logits)
