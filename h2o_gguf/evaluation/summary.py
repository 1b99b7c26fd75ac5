"""From results to rows: a mean with its interval for every cache, budget, length and task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from h2o_gguf.evaluation.cells import Cell, Kept
from h2o_gguf.evaluation.runner import Result
from h2o_gguf.evaluation.statistics import Interval, bootstrap
from h2o_gguf.evaluation.variants import Variant

__all__ = ["ALL", "FLOOR", "Row", "floors", "paired", "summarize"]

ALL = "all"
FLOOR = 0.8  # of the full cache: a task it fails says nothing about an eviction


@dataclass(frozen=True)
class Row:
    """One cache at one budget and length, on one task or on all that are no floor.

    score : 0 to 1. loss : of it to the full cache, paired by sample; None without results of the full cache.
    n_kept, kept_bytes : entries per KV head when the question came, and their bytes in all. peak_bytes : of K
    and V, as allocated. read_rate, write_rate : tokens per second. first_token_s : from the first token of
    the context to that of the answer. Medians.
    """

    variant: Variant
    kept: Kept
    budget: int
    length: int
    task: str
    score: Interval
    loss: Interval | None
    n_kept: int
    kept_bytes: int
    peak_bytes: int
    read_rate: float
    write_rate: float | None
    first_token_s: float

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self) | {"cache": self.variant.name}


def floors(results: Iterable[Result]) -> dict[tuple[int, str], float]:
    """(length, task) and score of the full cache, where that is below 0.8."""
    scores: dict[tuple[int, str], list[float]] = {}
    for result in results:
        if result.cell.variant.is_reference:
            scores.setdefault((result.cell.length, result.cell.task), []).append(result.outcome.score)
    means = {key: sum(values) / len(values) for key, values in scores.items()}
    return {key: mean for key, mean in means.items() if mean < FLOOR}


def paired(results: Sequence[Result]) -> list[tuple[Result, float | None]]:
    """Every result with the full cache's score on the same sample less its own; None without one."""
    full = {_sample(r.cell): r.outcome.score for r in results if r.cell.variant.is_reference}
    scores = ((result, full.get(_sample(result.cell))) for result in results)
    return [(result, None if score is None else score - result.outcome.score) for result, score in scores]


def summarize(results: Sequence[Result]) -> list[Row]:
    """The rows in the order of the results: of every task, and of all that are no floor."""
    low = floors(results)
    groups: dict[tuple[Any, ...], list[tuple[Result, float | None]]] = {}
    for result, loss in paired(results):
        cell = result.cell
        where = cell.length, cell.variant, cell.kept
        groups.setdefault((*where, cell.task), []).append((result, loss))
        if (cell.length, cell.task) not in low:
            groups.setdefault((*where, ALL), []).append((result, loss))
    return [_row(task, found) for (*_, task), found in groups.items()]


def _row(task: str, found: list[tuple[Result, float | None]]) -> Row:
    cell, outcomes = found[0][0].cell, [result.outcome for result, _ in found]
    scores: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for result, loss in found:
        scores.setdefault(result.cell.task, []).append(result.outcome.score)
        if loss is not None:
            losses.setdefault(result.cell.task, []).append(loss)
    written = [o.n_answer / o.answer_s for o in outcomes if o.n_answer and o.answer_s]
    return Row(
        variant=cell.variant,
        kept=cell.kept,
        budget=cell.budget,
        length=cell.length,
        task=task,
        score=bootstrap(list(scores.values())),
        loss=bootstrap(list(losses.values())) if losses else None,
        n_kept=round(median(o.n_kept for o in outcomes)),
        kept_bytes=round(median(o.kept_bytes for o in outcomes)),
        peak_bytes=max(o.peak_bytes for o in outcomes),
        read_rate=median((o.n_context + o.n_question) / (o.context_s + o.question_s) for o in outcomes),
        write_rate=median(written) if written else None,
        first_token_s=median(o.context_s + o.question_s for o in outcomes),
    )


def _sample(cell: Cell) -> tuple[Any, ...]:
    """What two caches must share to be compared."""
    return cell.length, cell.task, cell.seed, cell.index, cell.question
