"""Reads a document of any length once, through a cache that never grows, and answers about it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import InstanceOf

from h2o_gguf.cancel import CancelToken
from h2o_gguf.chat_template import ChatTemplate
from h2o_gguf.checked import checked
from h2o_gguf.documents import Document
from h2o_gguf.errors import BudgetError, Cancelled, ContextOverflowError, OptionError
from h2o_gguf.kinds import Callback, Integer, Spans, Text
from h2o_gguf.pieces import Tokenizer
from h2o_gguf.pins import budget_for
from h2o_gguf.policies import LayerBudgets
from h2o_gguf.reply import FinishReason, Reply, write_reply
from h2o_gguf.report import KVReport
from h2o_gguf.sampling import ChainSampler, SamplingOptions

__all__ = ["INSTRUCTION", "QUESTION", "ReadingProgress", "Summary", "summarize"]

INSTRUCTION = "Read the following document. You will be asked about it at its end."
QUESTION = "Summarize the document above: say what it is about and its main points, in a few sentences."
SAMPLING = SamplingOptions(temperature=0.0, repeat_penalty=1.1)
GAP = "\x1e"  # stands for the document in the rendered prompt; no text has it


@dataclass(frozen=True)
class ReadingProgress:
    """How far the reading has come.

    n_read : tokens.  n_total : tokens in all, estimated from the bytes until the end is reached; None for a
        stream.  rate : tokens per second so far.
    """

    n_read: int
    n_total: int | None
    rate: float


@dataclass(frozen=True)
class Summary:
    """The answer, and what it took.

    n_document, n_read, n_written : tokens of the document, of the whole prompt, of the answer.
    n_evicted : entries evicted per KV head.  n_replaced : places of the document that were no text.
    read_s, write_s : seconds.  is_cut_by_context : the answer ended because the sequence can hold no more.
    tokens : of the answer.
    """

    text: str
    finish_reason: FinishReason
    n_document: int
    n_read: int
    n_written: int
    n_evicted: int
    n_replaced: int
    kv: KVReport
    read_s: float
    write_s: float
    is_cut_by_context: bool
    tokens: tuple[int, ...] = ()


@checked
def summarize(
    llm: Any,
    document: InstanceOf[Document],
    *,
    instruction: Text = INSTRUCTION,
    question: Text = QUESTION,
    system: Text | None = None,
    sampling: InstanceOf[SamplingOptions] = SAMPLING,
    seed: Integer | None = None,
    max_tokens: Integer | None = 512,
    pin: Spans = (),
    template: InstanceOf[ChatTemplate] | None = None,
    progress: Callback | None = None,
    on_text: Callback | None = None,
    cancel: InstanceOf[CancelToken] | None = None,
) -> Summary:
    """Return what the model answers to `question` after it has read the document.

    The document streams through the cache in ubatches; the instruction before it and the question behind it
    are pinned, so that they survive whatever leaves. Memory does not depend on the document's length, but for
    four bytes or so a token of bookkeeping.

    llm : H2OLlama; its sequence is replaced. llm.cancel() and llm.close() stop this like a completion.
    progress : called with a ReadingProgress. on_text : gets the answer piece by piece.
    pin : half-open spans of positions that are never evicted either.

    Raises: Cancelled while reading; BudgetError, instruction and question do not fit; ContextOverflowError,
        before anything is read, the document does not fit and nothing may be evicted; OptionError, it is
        empty or no text; BusyError, ClosedError.
    """
    with llm.turn(cancel) as (_, token):
        engine, tokenizer = llm.engine, Tokenizer(llm)
        template = template or ChatTemplate.of(llm)
        head, tail = _frame(template, system, instruction, question)
        reading = _Reading(llm, document, progress, token)
        engine.reset()
        engine.pins = []
        first = tokenizer.first(head)
        last = tokenizer.more(tail)
        _check_fits(engine, len(first) + len(last) + sum(end - start for start, end in pin))
        if engine.policy is None:
            reading.check_fits(len(first) + len(last))
        engine.pins = [(0, len(first)), *pin]
        engine.prefill(first, cancel=token)
        reading.read()
        if reading.n_tokens == 0:
            raise OptionError(f"{document.name!r} is empty: there is nothing to read", "file")
        engine.pins = [(0, len(first)), (engine.n_past, engine.n_past + len(last)), *pin]
        engine.prefill(last, recall=True, cancel=token)
        reading.end()
        n_read, read_s = engine.n_past, reading.seconds
        reply, start_s = Reply(), time.perf_counter()
        chosen = replace(sampling, seed=random.Random(seed).randrange(1 << 32))
        with ChainSampler(engine.context.vocab, chosen) as sampler:
            for text in write_reply(
                engine, sampler, reply, max_tokens=max_tokens, stops=template.stops, cancel=token
            ):
                if on_text is not None:
                    on_text(text)
        kv = engine.report()
        return Summary(
            text=reply.text.strip(),
            finish_reason=reply.finish_reason,
            n_document=reading.n_tokens,
            n_read=n_read,
            n_written=len(reply.tokens),
            n_evicted=kv.evicted,
            n_replaced=document.n_replaced,
            kv=kv,
            read_s=read_s,
            write_s=time.perf_counter() - start_s,
            is_cut_by_context=reply.is_cut_by_context,
            tokens=tuple(reply.tokens),
        )


class _Reading:
    """Feeds a document to the engine."""

    def __init__(
        self,
        llm: Any,
        document: Document,
        progress: Callable[[ReadingProgress], None] | None,
        cancel: CancelToken,
    ) -> None:
        self._engine = llm.engine
        self._tokenizer = Tokenizer(llm)
        self._document = document
        self._progress = progress
        self._cancel = cancel
        self._start_s = time.perf_counter()
        self._n_bytes_done = 0
        self._pieces: Iterable[tuple[list[int], int]] = self._tokenized()
        self.n_tokens = 0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start_s

    def check_fits(self, n_frame: int) -> None:
        """Refuse a document that the context cannot hold beside n_frame tokens, before it is evaluated."""
        pieces: list[tuple[list[int], int]] = []
        n_tokens, n_bytes, n_ctx = n_frame, 0, self._engine.n_ctx
        for piece in self._pieces:
            pieces.append(piece)
            n_tokens, n_bytes = n_tokens + len(piece[0]), n_bytes + piece[1]
            if n_tokens > n_ctx:
                size = self._document.n_bytes
                whole = n_tokens if size is None else round(n_tokens * max(1.0, size / max(n_bytes, 1)))
                counted = "at least that many" if size is None else "estimated from its size"
                raise ContextOverflowError(
                    whole, n_ctx, f"({counted}) shorten it, raise n_ctx, or evict with policy='h2o+'"
                )
        self._pieces = pieces

    def _tokenized(self) -> Iterator[tuple[list[int], int]]:
        """The tokens of each piece, and its bytes."""
        for piece in self._document.pieces():
            if self._cancel.cancelled:
                raise Cancelled(f"cancelled after {self.n_tokens} tokens of the document")
            # In a document the name of a control token is text, or it could close its own quotation.
            tokens = self._tokenizer.more(piece, special=False)
            if tokens:
                yield tokens, len(piece.encode())

    def read(self) -> None:
        for tokens, n_bytes in self._pieces:
            n_before = self.n_tokens
            per_token = n_bytes / len(tokens)

            def report(n: int, _: int, n_before: int = n_before, per_token: float = per_token) -> None:
                self.n_tokens = n_before + n
                self._report(self._n_bytes_done + n * per_token)

            self._engine.prefill(tokens, progress=report, cancel=self._cancel)
            self.n_tokens = n_before + len(tokens)
            self._n_bytes_done += n_bytes

    def end(self) -> None:
        """The document is read: the total is known."""
        if self._progress is not None:
            self._progress(ReadingProgress(self.n_tokens, self.n_tokens, self._rate()))

    def _report(self, n_bytes: float) -> None:
        if self._progress is None:
            return
        size = self._document.n_bytes
        total = None if size is None else max(self.n_tokens, round(self.n_tokens * size / max(n_bytes, 1.0)))
        self._progress(ReadingProgress(self.n_tokens, total, self._rate()))

    def _rate(self) -> float:
        return self.n_tokens / max(self.seconds, 1e-9)


def _frame(template: ChatTemplate, system: str | None, instruction: str, question: str) -> tuple[str, str]:
    """The prompt before the document and behind it."""
    start = [] if system is None else [{"role": "system", "content": system}]
    content = f"{instruction}\n\n{GAP}\n\n{question}"
    prompt = template.render([*start, {"role": "user", "content": content}], opens_reply=True)
    head, _, tail = prompt.partition(GAP)
    return head, tail


def _check_fits(engine: Any, n_pinned: int) -> None:
    policy = engine.policy
    if policy is None:
        return
    hint = "raise kv_budget, split it less steeply (layer_budgets)"
    if isinstance(policy, LayerBudgets):
        policy = min(policy.parts.values(), key=lambda part: part.budget)
    else:
        hint = f"raise kv_budget to {budget_for(policy, n_pinned) + 1} or more"
    n_protected = n_pinned + policy.n_recent
    if n_protected >= policy.budget:
        raise BudgetError(
            f"instruction and question take {n_pinned} entries, the recent window {policy.n_recent}, which "
            f"leaves nothing of the budget of {policy.budget} for the document: "
            f"{hint}, or shorten them",
            budget=policy.budget,
            n_recent=policy.n_recent,
            n_pinned=n_pinned,
        )
