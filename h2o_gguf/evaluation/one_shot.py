"""The whole context in the cache, evicted once: read once for all policies and budgets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from h2o_gguf.evaluation.answering import finish, read_blocks
from h2o_gguf.evaluation.cells import Cell, Outcome
from h2o_gguf.evaluation.prompting import Prompt
from h2o_gguf.evaluation.sample import Sample
from h2o_gguf.state import put_session, save_session

if TYPE_CHECKING:
    from h2o_gguf.llama import H2OLlama

__all__ = ["answer_one_shot", "sharing"]


def sharing(cells: Sequence[Cell]) -> list[list[Cell]]:
    """The cells in groups that can use one reading: what their policies need of it is the same.

    Cells whose policies need nothing go with the first group. Traces are not a part of a saved sequence, so
    who keeps some of what queries told reads for itself.
    """
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    frugal: list[Cell] = []
    for cell in cells:
        policy = cell.variant.make(cell.budget)
        if not policy.needs_scores and not policy.n_observed and not policy.n_trace:
            frugal.append(cell)
            continue
        decay = policy.decay if policy.needs_scores else None
        own = (cell.variant, cell.budget) if policy.n_trace and policy.n_observed else None
        groups.setdefault((decay, policy.n_observed, own), []).append(cell)
    if not groups:
        return [frugal] if frugal else []
    first, *rest = groups.values()
    return [first + frugal, *rest]  # the first cell's policy does the reading


def answer_one_shot(
    llm: H2OLlama, cells: Sequence[Cell], sample: Sample, prompt: Prompt
) -> Iterator[tuple[Cell, Outcome]]:
    """Answer one sample after the eviction of each cell, all of them of one sharing and one kind of question.

    llm : with a policy of theirs and room for everything.
    """
    engine = llm.engine
    engine.reset()
    is_hidden = cells[0].question == "hidden"
    tokens = prompt.context if is_hidden else (*prompt.context, *prompt.question)
    read_s = read_blocks(engine, tokens, cells[0].n_batch)
    session = save_session(engine, {}) if len(cells) > 1 else None
    for i, cell in enumerate(cells):
        if i > 0 and session is not None:
            put_session(engine, session)
        started = time.perf_counter()
        if not cell.variant.is_full:
            engine.evict(cell.variant.make(cell.budget))
        context_s = read_s + time.perf_counter() - started
        yield cell, finish(llm, cell, sample, prompt, context_s)
