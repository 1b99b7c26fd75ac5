"""Works through cells, keeps what is done, and does nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from h2o_gguf.evaluation.cells import Cell, Outcome
from h2o_gguf.evaluation.sources import policy_key
from h2o_gguf.evaluation.store import Store
from h2o_gguf.protocols import Progress

__all__ = ["Answer", "Result", "batches", "n_tokens_left", "run"]

Answer = Callable[[Sequence[Cell]], Iterable[tuple[Cell, Outcome]]]


@dataclass(frozen=True)
class Result:
    """A cell and what came out.  is_new : in this run."""

    cell: Cell
    outcome: Outcome
    is_new: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self.cell.as_dict() | self.outcome.as_dict() | {"is_new": self.is_new}


def run(
    cells: Sequence[Cell], answer: Answer, store: Store, progress: Progress | None = None
) -> Iterator[Result]:
    """Yield the result of every cell, those of earlier runs first.

    answer : answers cells that share what is expensive, one after another. progress : tokens done, in all.
    What was yielded is stored, whatever happens next.
    """
    todo: list[Cell] = []
    for cell in cells:
        kept = store.get(_key(cell), Outcome)
        if kept is None:
            todo.append(cell)
        else:
            yield Result(cell, kept, is_new=False)
    n_done, n_total = 0, sum(cell.length for cell in todo)
    if todo and progress is not None:
        progress(0, n_total)
    for batch in batches(todo):
        for cell, outcome in answer(batch):
            store.put(_key(cell), outcome.as_dict())
            n_done += cell.length
            if progress is not None:
                progress(n_done, n_total)
            yield Result(cell, outcome, is_new=True)


def n_tokens_left(cells: Sequence[Cell], store: Store) -> int:
    """The tokens `run` would work through."""
    return sum(cell.length for cell in cells if store.get(_key(cell), Outcome) is None)


def batches(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells by what they share: bounded ones a cache, one-shot ones a length and a type of cache."""
    ordered = sorted(cells, key=_shared)
    return [list(batch) for _, batch in groupby(ordered, key=_shared)]


def _shared(cell: Cell) -> tuple[Any, ...]:
    variant = cell.variant
    if cell.mode == "bounded":
        return cell.mode, "", not variant.is_full, cell.budget, variant
    return cell.mode, cell.question, cell.length, variant.type_k, variant.type_v, variant.recall_every


def _key(cell: Cell) -> dict[str, Any]:
    return cell.as_dict() | {"policy": policy_key(cell.variant.make(cell.budget))}
