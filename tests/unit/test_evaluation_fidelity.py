"""Caches that read one text in turns: what is stored when, what progress says, and what writing takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_fakes import FakeAttic, FakeCache, FakeContext

from h2o_gguf.engine import Engine
from h2o_gguf.evaluation import side_by_side
from h2o_gguf.evaluation.evaluator import Evaluator
from h2o_gguf.evaluation.opening import WRITTEN
from h2o_gguf.evaluation.side_by_side import Reader, read_side_by_side
from h2o_gguf.evaluation.store import Store
from h2o_gguf.evaluation.variants import FULL, Variant

N = 32
READERS = [
    Reader(Variant(FULL), 1.0, N),
    *(Reader(Variant("streaming"), budget, budget) for budget in (9, 8, 7)),
]


class Model:
    """Opens engines without weights; breaks off when one too many is to be opened."""

    def __init__(self, n_most: int = 100) -> None:
        self.n_most = n_most
        self.opened: list[int] = []  # budgets
        self.caches: list[FakeCache] = []
        self.contexts: list[FakeContext] = []
        self.attics: list[FakeAttic | None] = []

    @contextmanager
    def open(self, variant: Variant, policy: Any, n_batch: int) -> Iterator[Any]:
        if len(self.opened) == self.n_most:
            raise KeyboardInterrupt
        context = FakeContext(n_batch=n_batch)
        cache = FakeCache(context, policy)
        self.opened.append(policy.budget)
        self.contexts.append(context)
        self.caches.append(cache)
        attic = FakeAttic(context, variant.recall_every) if variant.attic else None
        engine = Engine(context, None, policy, cache=cache, attic=attic)  # type: ignore[arg-type]
        self.attics.append(attic)
        yield SimpleNamespace(engine=engine, tokenize=lambda text: [1 + i % 30 for i in range(N)])


@pytest.fixture(autouse=True)
def two_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "_n_open", lambda _: 2)


def test_readers_that_do_not_fit_at_once_read_in_parts_beside_the_full_cache() -> None:
    model, seen = Model(), list[tuple[int, int]]()
    found = list(read_side_by_side(model, "", READERS, N, 8, lambda n, total: seen.append((n, total))))  # type: ignore[arg-type]
    assert [each.budget for each in found] == [N, 9, 8, 7]
    assert model.opened == [N + WRITTEN, 9, N + WRITTEN, 8, N + WRITTEN, 7]
    assert seen == [(8 * i, 6 * N) for i in range(1, 25)]


def test_what_was_read_together_is_kept_before_others_are_read(tmp_path: Path) -> None:
    evaluator = Evaluator(Model(n_most=4), "A text.")  # type: ignore[arg-type]
    with closing(Store(tmp_path, {})) as store, pytest.raises(KeyboardInterrupt):
        evaluator.fidelity(READERS, N, 8, store)
    evaluator.model = later = Model()  # type: ignore[assignment]
    with closing(Store(tmp_path, {})) as store:
        found = evaluator.fidelity(READERS, N, 8, store)
    assert [each.budget for each in found] == [N, 9, 8, 7]
    assert later.opened == [N + WRITTEN, 7]


def test_writing_decodes_all_its_tokens_and_evicts_once() -> None:
    model = Model()
    list(read_side_by_side(model, "", READERS[:2], N, 8))  # type: ignore[arg-type]
    for context in model.contexts:
        assert [len(batch) for batch in context.batches[N // 8 :]] == [1] * WRITTEN
    assert model.caches[1].rooms[-1] == WRITTEN


def test_a_reader_recalls_where_it_would_while_writing_and_nothing_before_sees_it() -> None:
    """Every 10 of 32 tokens, in batches of 8: the tokens at 9, 19 and 29 recall alone."""
    model = Model()
    variant = Variant("streaming", attic=True, recall_every=10)
    readers = [READERS[0], Reader(Variant("streaming"), 9, 9), Reader(variant, 9, 9)]
    full, plain, recalling = read_side_by_side(model, "", readers, N, 8)  # type: ignore[arg-type]
    attic, context = model.attics[-1], model.contexts[-1]
    assert attic is not None and attic.asked[:3] == [9, 19, 29]
    starts = np.cumsum([0, *(len(batch) for batch in context.batches)]).tolist()
    assert starts[: starts.index(N)] == [0, 8, 9, 10, 16, 19, 20, 24, 29, 30]
    assert attic.asked[3:] == [N + i for i in range(9, WRITTEN, 10)], "and while writing"
    assert recalling.n_scored == plain.n_scored == full.n_scored == N // 2 - 1
    assert recalling.perplexity == plain.perplexity, "each token is compared at its own position"
