"""What is measured: a cell is one sample answered under one cache; and what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from h2o_gguf.errors import OptionError
from h2o_gguf.evaluation.variants import FULL, Variant

__all__ = ["Cell", "Kept", "Mode", "Outcome", "Question", "budget_of", "plan"]

Mode = Literal["bounded", "one-shot"]
Question = Literal["hidden", "seen"]
Kept = float | int  # a share of the length, below 1; or entries per KV head


@dataclass(frozen=True, order=True)
class Cell:
    """One sample under one cache.

    budget : entries per KV head; the length for the full cache. kept : what was asked for, 1.0 for it.
    mode : "bounded": the budget is kept after each batch of n_batch tokens and while answering. "one-shot":
    the whole context is read, then evicted once. question : "hidden": it comes after the eviction.
    length : tokens of context, question and answer, at most. seed, index : of the sample.
    """

    variant: Variant
    budget: int
    kept: Kept
    mode: Mode
    question: Question
    length: int
    task: str
    seed: int
    index: int
    n_batch: int

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON and for keys."""
        return asdict(self) | {"cache": self.variant.name}


@dataclass(frozen=True)
class Outcome:
    """What came out of a cell.

    score : 0 to 1. answer : as written, cut where it was right. n_context, n_question, n_answer : tokens.
    n_kept : entries per KV head when the question came, or, where it was seen, when the answer began.
    kept_bytes : theirs, in all layers and heads. peak_bytes : of K and V, as allocated.
    context_s, question_s, answer_s : seconds of reading the context (where several cells share a reading, the
    same in each), an eviction included, of reading the question (0 where it was seen: the context's has it),
    and of writing the answer.
    """

    score: float
    answer: str
    n_context: int
    n_question: int
    n_answer: int
    n_kept: int
    kept_bytes: int
    peak_bytes: int
    context_s: float
    question_s: float
    answer_s: float

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def budget_of(kept: Kept, length: int) -> int:
    """Entries per KV head.  Raises: OptionError, kept is no share and no number of entries of the length."""
    budget = round(kept * length) if 0 < kept < 1 else int(kept)
    if not 1 <= budget < length:
        raise OptionError(
            f"kept {kept} of {length} tokens is no budget: it must be a share between 0 and 1, such as 0.25, "
            f"or 1 to {length - 1} entries",
            "kept",
        )
    return budget


def plan(
    variants: Sequence[Variant],
    kept: Sequence[Kept],
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    n_samples: int,
    seed: int = 0,
    mode: Mode = "bounded",
    question: Question = "hidden",
    n_batch: int = 128,
) -> list[Cell]:
    """Every cell, those of the full cache first.  Raises: OptionError, a budget is none."""

    def cells(variant: Variant, budget: int, share: Kept, length: int) -> list[Cell]:
        return [
            Cell(variant, budget, share, mode, question, length, task, seed, index, n_batch)
            for task in tasks
            for index in range(n_samples)
        ]

    found = [cell for length in lengths for cell in cells(Variant(FULL), length, 1.0, length)]
    for length in lengths:
        for variant in variants:
            if variant.is_full:
                found += cells(variant, length, 1.0, length)
                continue
            for share in kept:
                found += cells(variant, budget_of(share, length), share, length)
    return found
