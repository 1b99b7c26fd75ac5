"""Reading a prompt and writing an answer, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.batches import batches
from h2o_gguf.evaluation.cells import Cell, Outcome
from h2o_gguf.evaluation.prompting import Prompt
from h2o_gguf.evaluation.sample import Sample, score
from h2o_gguf.policies import LayerBudgets, Policy
from h2o_gguf.protocols import Logits
from h2o_gguf.restoring import put_session, save_session

if TYPE_CHECKING:
    from h2o_gguf.engine import Engine
    from h2o_gguf.llama import H2OLlama

__all__ = ["Asked", "answer_bounded", "finish", "from_one_reading", "pins_of", "read_blocks"]


@dataclass(frozen=True)
class Asked:
    """A cell, its sample, and the sample's tokens."""

    cell: Cell
    sample: Sample
    prompt: Prompt


class Greedy:
    """Always the likeliest token."""

    def sample(self, logits: Logits, tokens: NDArray[np.intc]) -> int:
        """The token with the largest logit."""
        return int(logits.argmax())

    def accept(self, token: int) -> None:
        """Nothing to remember."""


def read_blocks(engine: Engine, tokens: Sequence[int], n_batch: int, *, recall: bool = False) -> float:
    """Read tokens, n_batch at a time, with the budget kept after each; return the seconds.

    recall : the last of them, a question's, fetch back evicted entries, if the engine's recalls are on.
    """
    started = time.perf_counter()
    end = engine.n_past + len(tokens)
    n_question = engine.recalls.n_question(engine.pins, end, n_batch) if recall else 0
    cut = max(0, len(tokens) - n_question)
    for start, end in batches(cut, n_batch):
        engine.prefill(tokens[start:end])
    if recall:
        engine.prefill(tokens[cut:], recall=True)
    return time.perf_counter() - started


def answer_bounded(llm: H2OLlama, asked: Sequence[Asked]) -> Iterator[tuple[Cell, Outcome]]:
    """Answer what is asked about one text, from an empty cache whose budget is kept after each batch.

    asked : under one cache.
    """
    engine = llm.engine
    is_hidden = asked[0].cell.question == "hidden"
    for group in [asked] if is_hidden else [[each] for each in asked]:
        first = group[0]
        engine.reset()
        engine.recalls.is_on = first.cell.variant.attic
        engine.pins = pins_of(engine.policy, first.prompt)
        tokens = first.prompt.context if is_hidden else (*first.prompt.context, *first.prompt.question)
        context_s = read_blocks(engine, tokens, first.cell.n_batch, recall=not is_hidden)
        for each in from_one_reading(engine, group):
            yield each.cell, finish(llm, each, context_s)


def pins_of(policy: Policy | None, prompt: Prompt) -> list[tuple[int, int]]:
    """The prompt's pin, as much of it as fits into the policy's budgets."""
    start, end = prompt.pin
    if policy is None:
        return []
    for part in policy.parts.values() if isinstance(policy, LayerBudgets) else [policy]:
        n_room = part.budget - part.n_sink - part.n_recent
        end = min(end, max(start, part.n_sink) + n_room)
    return [(start, end)] if start < end else []


def from_one_reading(engine: Engine, asked: Sequence[Asked]) -> Iterator[Asked]:
    """Each of what is asked, with the cache as it is now."""
    session = save_session(engine, {}) if len(asked) > 1 else None
    for i, each in enumerate(asked):
        if i > 0 and session is not None:
            put_session(engine, session)
        yield each


def finish(llm: H2OLlama, asked: Asked, context_s: float) -> Outcome:
    """Ask what is still hidden, and write the answer: greedily, until it is right, ends, or is too long.

    context_s : seconds of what was read, an eviction included.
    """
    engine, sample, prompt, cell = llm.engine, asked.sample, asked.prompt, asked.cell
    engine.recalls.is_on = cell.variant.attic
    kept = engine.report()
    question_s = 0.0
    if cell.question == "hidden":
        question_s = read_blocks(engine, prompt.question, cell.n_batch, recall=True)

    def is_done(text: str) -> bool:
        return sample.can_stop_early and score(sample, text) == 1.0

    text, n_answer, answer_s = _write(llm, prompt.n_answer, is_done)
    return Outcome(
        score=score(sample, text),
        answer=text,
        n_context=len(prompt.context),
        n_question=len(prompt.question),
        n_answer=n_answer,
        n_kept=kept.used,
        kept_bytes=kept.used_bytes,
        peak_bytes=kept.bytes,
        context_s=context_s,
        question_s=question_s,
        answer_s=answer_s,
    )


def _write(llm: H2OLlama, n_most: int, is_done: Callable[[str], bool]) -> tuple[str, int, float]:
    """Text, tokens that were decoded, seconds."""
    vocab = llm.engine.context.vocab
    tokens: list[int] = []
    text = ""
    started = time.perf_counter()
    for token in llm.engine.generate(Greedy(), max_tokens=n_most):
        if vocab.is_end(token):
            break
        tokens.append(token)
        text = llm.detokenize(tokens).decode("utf-8", "replace")
        if is_done(text):
            break
    # The last token is chosen but not decoded.
    return text, max(0, len(tokens) - 1), time.perf_counter() - started
