"""The evaluation on a real model: the budget holds when the question comes, and figures agree with others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from llama_harness import english, model_path, open_llama
from numpy.typing import NDArray

from h2o_gguf import policies
from h2o_gguf.evaluation import measure_fidelity, read_full, side_by_side
from h2o_gguf.evaluation.cells import Cell, plan
from h2o_gguf.evaluation.evaluation import evaluate
from h2o_gguf.evaluation.evaluator import Evaluator
from h2o_gguf.evaluation.opening import ModelFile
from h2o_gguf.evaluation.runner import batches
from h2o_gguf.evaluation.settings import QUICK_RUN, Settings
from h2o_gguf.evaluation.side_by_side import Reader, read_side_by_side
from h2o_gguf.evaluation.variants import FULL, Variant, with_attics
from h2o_gguf.policies import Cells, registry
from h2o_gguf.view import CacheView

LENGTH = 300


@pytest.fixture
def evaluator() -> Evaluator:
    return Evaluator(ModelFile(model_path(), n_threads=1))


def cells_of(mode: Any, question: Any = "hidden", n_samples: int = 1) -> list[Cell]:
    variants = [Variant("h2o+"), Variant("streaming")]
    return plan(
        variants, [0.5, 0.25], ["single-noise"], [LENGTH], n_samples=n_samples, mode=mode, question=question,
        n_batch=32,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["bounded", "one-shot"])
@pytest.mark.parametrize("question", ["hidden", "seen"])
def test_the_budget_holds_before_the_question_is_answered(
    evaluator: Evaluator, mode: str, question: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the question's first batch is decoded, hidden, no more than the budget is left of the context."""
    from h2o_gguf.context import Context

    decode = Context.decode
    calls: list[list[int]] = []

    def spy(self: Context, tokens: Sequence[int], pos: int, **options: Any) -> int:
        calls.append(list(tokens))
        return decode(self, tokens, pos, **options)

    monkeypatch.setattr(Context, "decode", spy)
    cells = cells_of(mode, question)
    of_policies = [cell for cell in cells if cell.variant.policy == "h2o+"]
    found = {cell.budget: outcome for cell in of_policies for cell, outcome in evaluator.answer([cell])}
    assert set(found) == {150, 75}
    for budget, outcome in found.items():
        assert outcome.n_kept == budget < outcome.n_context
        assert outcome.kept_bytes == budget * 30 * 3 * 64 * 2 * 2  # layers, KV heads, numbers, K and V, f16
    _, prompt = evaluator._sample(cells[0], None)  # type: ignore[arg-type]
    # Hidden: the question begins a batch of its own.
    begins = [
        call[: len(prompt.question)] == list(prompt.question)[: len(call)] for call in calls if len(call) > 1
    ]
    assert any(begins) == (question == "hidden")


@pytest.mark.parametrize("question", ["hidden", "seen"])
def test_a_question_recalls_what_its_budget_lost(evaluator: Evaluator, question: str) -> None:
    """A window of the newest entries has lost the needle, and its attic gives it back."""
    variants = with_attics([Variant("streaming")])
    cells = plan(
        variants, [0.25], ["grid-000"], [LENGTH], n_samples=2, question=question, n_batch=32  # type: ignore[arg-type]
    )  # fmt: skip
    found = {cell: outcome for cell in cells for _, outcome in evaluator.answer([cell])}
    scores = {
        is_kept: sum(
            o.score for c, o in found.items() if c.variant.policy != FULL and c.variant.attic == is_kept
        )
        for is_kept in (False, True)
    }
    assert scores == {False: 0.0, True: 2.0}
    assert {o.n_kept for c, o in found.items() if not c.variant.is_full} == {75}, (
        "the budget holds all the same"
    )


def test_kept_bytes_of_budgets_by_layer_are_those_of_each_layer(evaluator: Evaluator) -> None:
    """Four sinks in every layer, the rest of 75 in a line; 3 KV heads of 64 numbers, K and V, f16."""
    variants = [Variant("h2o+", layers="pyramid:2")]
    cells = plan(variants, [0.25], ["single-noise"], [LENGTH], n_samples=1, n_batch=32)
    ((_, outcome),) = evaluator.answer([cell for cell in cells if cell.variant.layers])
    assert outcome.kept_bytes == sum(policies.pyramid(30, 75, 4, beta=2)) * 3 * 64 * 2 * 2
    assert outcome.n_kept == 75


def test_pins_fit_the_smallest_budget_of_a_split(evaluator: Evaluator) -> None:
    variants = [Variant("h2o+", layers="pyramid:2")]
    cells = plan(variants, [0.15], ["instructions-pinned"], [LENGTH], n_samples=1, n_batch=32)
    ((_, outcome),) = evaluator.answer([cell for cell in cells if cell.variant.layers])
    assert outcome.n_kept == 45


def test_one_reading_answers_as_a_reading_of_its_own(evaluator: Evaluator) -> None:
    """What was restored and evicted is what would have been read and evicted."""
    cells = [cell for cell in cells_of("one-shot") if cell.variant.policy in (FULL, "h2o+")]
    shared = dict(evaluator.answer(cells))
    for cell in cells:
        ((_, alone),) = evaluator.answer([cell])
        assert (alone.answer, alone.n_kept) == (shared[cell].answer, shared[cell].n_kept)


@pytest.mark.parametrize("mode", ["bounded", "one-shot"])
def test_several_questions_share_a_reading(evaluator: Evaluator, mode: Any) -> None:
    """Each answer is what a reading of its own gives, also of a policy that remembers.

    With an attic a bounded text is read otherwise, since it recalls for itself; one read whole is not.
    """
    tasks = ["rivals-000", "rivals-050", "rivals-100"]
    cells = plan(with_attics([Variant("h2o+")]), [0.25], tasks, [400], n_samples=1, n_batch=32, mode=mode)
    batch = [cell for cell in cells if not cell.variant.is_full]
    readings = batches(batch)
    assert len(readings) == (2 if mode == "bounded" else 1)
    shared = {cell: outcome for reading in readings for cell, outcome in evaluator.answer(reading)}
    assert len(shared) == 6
    assert len({outcome.context_s for outcome in shared.values()}) == (2 if mode == "bounded" else 6)
    for cell in batch:
        ((_, alone),) = evaluator.answer([cell])
        assert alone.answer == shared[cell].answer
    with_attic = [outcome.answer for cell, outcome in shared.items() if cell.variant.attic]
    without = [outcome.answer for cell, outcome in shared.items() if not cell.variant.attic]
    assert with_attic != without


def test_the_full_cache_is_never_evicted_from(evaluator: Evaluator) -> None:
    for mode in ("bounded", "one-shot"):
        ((_, outcome),) = evaluator.answer(cells_of(mode)[:1])
        assert outcome.n_kept == outcome.n_context and outcome.score == 1.0


def test_fidelity_side_by_side_is_fidelity_one_by_one() -> None:
    text, n, batch = english(6000), 256, 32
    readers = [Reader(Variant(FULL), 1.0, n), Reader(Variant("h2o+"), 0.25, 64)]
    full, found = read_side_by_side(ModelFile(model_path(), 1), text, readers, n, batch)
    with open_llama(policy=policies.make("streaming", n + 64), n_batch=batch, kv_block=batch) as llm:
        tokens = llm.tokenize(text.encode())[:n]
        reference = read_full(llm, tokens, n // 2)
    with open_llama(policy=policies.make("h2o+", 64), n_batch=batch, kv_block=batch) as llm:
        expected = measure_fidelity(llm, tokens, reference)
    assert found.perplexity == pytest.approx(expected.perplexity, rel=1e-5)
    assert found.ratio.mean == pytest.approx(expected.ratio, rel=1e-5)
    assert (found.kl, found.top1) == (pytest.approx(expected.kl, rel=1e-3), expected.top1)
    assert (full.kl, full.top1, full.ratio.mean) == (0.0, 1.0, 1.0)
    assert found.n_scored == n // 2 - 1 and found.n_kept == 64


@dataclass(frozen=True)
class Watching:
    """Keeps what the recorded queries look at."""

    budget: int
    name: ClassVar[str] = "watching"
    needs_scores: ClassVar[bool] = False
    n_observed: ClassVar[int] = 8

    def victims(self, view: CacheView, n: int) -> Cells:
        seen = np.stack([view.attention(row).sum((1, 2)) for row in range(view.shape[0])])
        return policies.select_lowest(view, seen, view.evictable(4, 16), n, "head")


def test_recorded_queries_are_a_part_of_what_is_shared(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.OURS, "watching", Watching)
    cells = plan(
        [Variant("watching")], [0.5, 0.25], ["single-noise"], [LENGTH], n_samples=1, mode="one-shot",
        n_batch=32,
    )  # fmt: skip
    shared = dict(evaluator.answer(cells[1:]))
    ((cell, alone),) = evaluator.answer(cells[2:])
    assert (alone.answer, alone.n_kept) == (shared[cell].answer, shared[cell].n_kept)
    assert alone.n_kept == 75


@dataclass(frozen=True)
class Remembering:
    """Counts how often each entry was observed."""

    budget: int
    most: ClassVar[list[float]] = []
    name: ClassVar[str] = "remembering"
    needs_scores: ClassVar[bool] = False
    n_observed: ClassVar[int] = 8
    n_trace: ClassVar[int] = 1

    def observe(self, view: CacheView) -> NDArray[np.float32]:
        assert view.traces is not None
        return np.where(view.pos >= 0, view.traces + 1, 0)

    def victims(self, view: CacheView, n: int) -> Cells:
        assert view.traces is not None
        self.most.append(float(view.traces.max()))
        return policies.select_lowest(view, view.traces[0], view.evictable(4, 16), n, "head")


def test_an_eviction_after_one_reading_knows_what_was_observed_while_reading(
    evaluator: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.OURS, "remembering", Remembering)
    cells = plan(
        [Variant("remembering")], [0.5], ["single-noise"], [LENGTH], n_samples=1, mode="one-shot", n_batch=32
    )
    ((_, outcome),) = evaluator.answer(cells[1:])
    assert Remembering.most == [-(-outcome.n_context // 32)]  # once a batch


@pytest.mark.parametrize(("n_open", "n_readings"), [(16, 3), (2, 4)])
def test_one_count_runs_over_the_text_and_the_answers(
    n_open: int, n_readings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full cache, streaming and random; where only two fit into memory, the first reads with each other."""
    monkeypatch.setattr(side_by_side, "_n_open", lambda model: n_open)
    settings = Settings.of(
        QUICK_RUN, policies=["streaming"], kept="0.5", tasks=["fidelity", "single-noise"], lengths=[LENGTH],
        n_samples=1, cache="off", seed=0, text=None, n_batch=64, n_threads=1, n_gpu_layers=0,
    )  # fmt: skip
    seen: list[tuple[int, int]] = []
    evaluate(model_path(), settings, lambda n, n_total: seen.append((n, n_total)))
    n_total = (n_readings + 3) * LENGTH
    assert {total for _, total in seen} == {n_total}
    assert seen == sorted(seen) and seen[-1] == (n_total, n_total)
