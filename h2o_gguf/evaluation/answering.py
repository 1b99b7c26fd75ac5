"""Reading a prompt and writing an answer, timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.attic import N_TURN
from h2o_gguf.evaluation.cells import Cell, Outcome
from h2o_gguf.evaluation.prompting import Prompt
from h2o_gguf.evaluation.sample import Sample, score
from h2o_gguf.protocols import Logits

if TYPE_CHECKING:
    from h2o_gguf.engine import Engine
    from h2o_gguf.llama import H2OLlama

__all__ = ["answer_bounded", "finish", "read_blocks"]


class Greedy:
    """Always the likeliest token."""

    def sample(self, logits: Logits, tokens: NDArray[np.intc]) -> int:
        """The token with the largest logit."""
        return int(logits.argmax())

    def accept(self, token: int) -> None:
        """Nothing to remember."""


def read_blocks(engine: Engine, tokens: Sequence[int], n_batch: int, *, recall: bool = False) -> float:
    """Read tokens, n_batch at a time, with the budget kept after each; return the seconds.

    recall : the last of them, a question's, fetch back evicted entries, as Engine.prefill says.
    """
    started = time.perf_counter()
    n_last = min(len(tokens), n_batch, N_TURN) if recall else 0
    n_first = len(tokens) - n_last
    for start in range(0, n_first, n_batch):
        engine.prefill(tokens[start : min(start + n_batch, n_first)])
    if n_last:
        engine.prefill(tokens[n_first:], recall=True)
    return time.perf_counter() - started


def answer_bounded(llm: H2OLlama, cell: Cell, sample: Sample, prompt: Prompt) -> Outcome:
    """Answer from an empty cache whose budget is kept after each batch and while answering."""
    engine = llm.engine
    engine.reset()
    if cell.question == "hidden":
        context_s = read_blocks(engine, prompt.context, cell.n_batch)
        return finish(llm, cell, sample, prompt, context_s)
    both = (*prompt.context, *prompt.question)
    both_s = read_blocks(engine, both, cell.n_batch, recall=cell.variant.attic)
    return finish(llm, cell, sample, prompt, both_s)


def finish(llm: H2OLlama, cell: Cell, sample: Sample, prompt: Prompt, context_s: float) -> Outcome:
    """Ask what is still hidden, and write the answer: greedily, until it is right, ends, or is too long.

    context_s : seconds of what was read, an eviction included.
    """
    engine = llm.engine
    kept = engine.report()
    question_s = 0.0
    if cell.question == "hidden":
        question_s = read_blocks(engine, prompt.question, cell.n_batch, recall=cell.variant.attic)

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
