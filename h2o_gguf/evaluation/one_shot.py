"""The whole context in the cache, evicted once: read once for all policies and budgets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from h2o_gguf.evaluation.answering import Asked, finish, from_one_reading, pins_of, read_blocks
from h2o_gguf.evaluation.cells import Cell, Outcome

if TYPE_CHECKING:
    from h2o_gguf.llama import H2OLlama

__all__ = ["answer_one_shot", "sharing"]


def sharing(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in groups that can use one reading: what their policies need of it is the same.

    Cells whose policies need nothing go with the first group. Policies that keep some of what queries told
    read for themselves, once for all budgets.
    """
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    frugal: list[Cell] = []
    for cell in cells:
        policy = cell.variant.make(cell.budget)
        if not policy.needs_scores and not policy.n_observed and not policy.n_trace:
            frugal.append(cell)
            continue
        decay = policy.decay if policy.needs_scores else None
        own = cell.variant.policy if policy.n_trace and policy.n_observed else None
        groups.setdefault((decay, policy.n_observed, own), []).append(cell)
    if not groups:
        return [frugal] if frugal else []
    first, *rest = groups.values()
    return [first + frugal, *rest]  # the first cell's policy does the reading


def answer_one_shot(llm: H2OLlama, asked: Sequence[Asked]) -> Iterator[tuple[Cell, Outcome]]:
    """Answer what is asked about one text after the eviction of each cell, all of them of one sharing.

    llm : with a policy of theirs and room for everything.
    """
    engine = llm.engine
    engine.reset()
    engine.recalls.is_on = False
    first = asked[0]
    tokens = first.prompt.context
    if first.cell.question == "seen":
        tokens = (*tokens, *first.prompt.question)
    read_s = read_blocks(engine, tokens, first.cell.n_batch)
    for each in from_one_reading(engine, asked):
        started = time.perf_counter()
        if not each.cell.variant.is_full:
            policy = each.cell.variant.make(each.cell.budget)
            engine.pins = pins_of(policy, each.prompt)
            engine.evict(policy)
            if engine.attic is not None:
                engine.attic.policy = policy
        yield each.cell, finish(llm, each, read_s + time.perf_counter() - started)
