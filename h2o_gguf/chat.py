"""A conversation that goes on for ever in a KV cache that never grows."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from pydantic import InstanceOf

from h2o_gguf.cancel import CancelToken
from h2o_gguf.chat_template import ChatTemplate
from h2o_gguf.checked import checked
from h2o_gguf.documents import Document
from h2o_gguf.errors import OptionError
from h2o_gguf.explain.explanation import Explanation, explain_reply
from h2o_gguf.explain.recording import Recording, why_not_recorded
from h2o_gguf.kinds import Integer, Spans, Switch, Text
from h2o_gguf.lock import Turn as CallTurn
from h2o_gguf.pieces import Tokenizer
from h2o_gguf.protocols import Progress
from h2o_gguf.reply import FinishReason, Reply, write_reply
from h2o_gguf.report import KVReport
from h2o_gguf.sampling import ChainSampler, SamplingOptions
from h2o_gguf.taking_back import taken_back

__all__ = ["Attachment", "ChatSession", "Turn"]


N_PREDICT = 2048  # a bounded cache never ends a reply by being full, so something else must
SEEDS = 1 << 32


@dataclass(frozen=True)
class Turn:
    """What one reply took.

    n_read, n_written : tokens.  n_reused : tokens of the conversation that were in the cache already.
    n_evicted : entries per KV head evicted meanwhile.  read_s, write_s : seconds.
    is_cut_by_context : the reply ended because the sequence can hold no more.
    """

    finish_reason: FinishReason
    n_read: int
    n_reused: int
    n_written: int
    n_evicted: int
    read_s: float
    write_s: float
    is_cut_by_context: bool


@dataclass(frozen=True)
class Attachment:
    """A document that goes with the next message.  n_replaced : places that were no text, now U+FFFD."""

    name: str
    text: str
    n_replaced: int


class ChatSession:
    """A conversation with one model.

    Each turn decodes only what is new; the system message is pinned. Where the template rewrites what was
    said before, or the cache was used by others meanwhile, the conversation is read again.

    A reply is a stream of `llm`, as those of create_completion are: other threads wait until it ends or is
    closed, llm.cancel() stops it, and llm.close() cancels it first.

    messages : the conversation, oldest first, as {"role", "content"}.  last : what the last reply took.
    pins_system : whether the cache has a system message that is never evicted.
    """

    @checked
    def __init__(
        self,
        llm: Any,
        *,
        system: Text | None = None,
        sampling: InstanceOf[SamplingOptions] | None = None,
        seed: Integer | None = None,
        max_tokens: Integer | None = N_PREDICT,
        pin: Spans = (),
        template: InstanceOf[ChatTemplate] | None = None,
        records: Switch = False,
    ) -> None:
        """llm : H2OLlama.  seed : None draws anew each time.  max_tokens : of a reply; None as many as the
            model was trained to see.

        pin : half-open spans of positions that are never evicted either.  records : note what leaves, which
            `explain` needs: four bytes for each token, layer and KV head.
        """
        self.template = template or ChatTemplate.of(llm)
        self.sampling = sampling or SamplingOptions()
        self.seed = seed
        self.max_tokens = max_tokens
        self.messages: list[dict[str, str]] = []
        self.last: Turn | None = None
        self.pins_system = False
        self.n_tokens_read = 0
        self.n_tokens_written = 0
        self._llm = llm
        self._pin = list(pin)
        self._engine = llm.engine
        is_recorded = records and not why_not_recorded(llm.engine)
        self._recording = Recording(llm.engine) if is_recorded else None
        self._tokenizer = Tokenizer(llm)
        self._attachments: list[Attachment] = []
        self.reseed()
        self._prompt: str | None = (
            None  # what the cache says, as the template renders it, up to the last reply
        )
        self._n_prompt = 0  # the position where that reply begins
        self._reply = Reply()  # that reply
        self._tokens: list[int] = []  # the cache's tokens after it
        if system is not None:
            self.set_system(system)

    @property
    def system(self) -> str | None:
        """The system message."""
        if self.messages and self.messages[0]["role"] == "system":
            return self.messages[0]["content"]
        return None

    def ask(
        self, text: str, *, progress: Progress | None = None, cancel: CancelToken | None = None
    ) -> Generator[str, None, None]:
        """Yield the reply to a message, piece by piece.

        The message is read when the first piece is asked for. A reply that is cut off, by `cancel` or because
        the caller stops iterating, stays in the conversation as far as it came. A message that could not be
        read to its end is taken back, with its attachments.

        progress : called with (tokens read, tokens in all) while reading.

        Raises: Cancelled while the message is read; ContextOverflowError, BudgetError, ChatTemplateError;
            BusyError, ClosedError.
        """
        with self._llm.turn(cancel) as (turn, token):
            n_before, sent = len(self.messages), list(self._attachments)
            documents = [f"Document {a.name}:\n\n{a.text.rstrip()}" for a in sent]
            try:
                self.messages.append({"role": "user", "content": "\n\n".join([*documents, text])})
                yield from _handed_out(turn, self._answer(progress, token))
            finally:
                if len(self.messages) == n_before + 1:  # without a reply
                    self.messages.pop()
                elif len(self.messages) > n_before:
                    self._attachments[:] = [a for a in self._attachments if all(a is not b for b in sent)]

    def regenerate(
        self, *, progress: Progress | None = None, cancel: CancelToken | None = None
    ) -> Generator[str, None, None]:
        """Yield another reply to the last message.

        Exact and at once where the old reply lies inside the recent window; else all is read again.

        Raises: OptionError, there is no reply yet; and what `ask` raises, with the old reply kept.
        """
        with self._llm.turn(cancel) as (turn, token):
            if not self.messages or self.messages[-1]["role"] != "assistant":
                raise OptionError("there is no reply to make again: say something first", "regenerate")
            old = self.messages[-1]
            self._prompt = None
            try:
                self.messages.pop()
                yield from _handed_out(turn, self._answer(progress, token))
            finally:
                if self.messages[-1]["role"] == "user":
                    self.messages.append(old)

    def explain(self, *, progress: Progress | None = None, cancel: CancelToken | None = None) -> Explanation:
        """Return what the cache held when the last reply was written, and what that reply looked at.

        The conversation is read twice more, in a context of its own.  progress : of both together.

        Raises: OptionError, there is no reply, or nothing was recorded; what explain_reply raises.
        """
        if reason := why_not_recorded(self._engine):
            raise OptionError(reason, "policy")
        if self._recording is None:
            raise OptionError("this chat does not note what leaves: make it with records=True", "records")
        has_reply = bool(self.messages) and self.messages[-1]["role"] == "assistant"
        reply = self._reply.tokens if has_reply else []
        return explain_reply(
            self._llm, self._recording, self._n_prompt, reply, progress=progress, cancel=cancel
        )

    def clear(self) -> None:
        """Forget the conversation; the system message stays."""
        del self.messages[0 if self.system is None else 1 :]
        self._attachments.clear()
        self._prompt = self.last = None
        self.n_tokens_read = self.n_tokens_written = 0

    def set_system(self, text: str | None) -> None:
        """Change the system message; the conversation is read again with the next message."""
        self._prompt = None
        n_old = int(self.system is not None)
        self.messages[:n_old] = [] if text is None else [{"role": "system", "content": text}]

    def reseed(self) -> None:
        """Start the random numbers of the replies again from `seed`."""
        self._draws = random.Random(self.seed)

    def read_file(self, path: str | os.PathLike[str]) -> Attachment:
        """Attach a text file of any length to the next message.  Raises: OptionError, it cannot be read."""
        with Document.open(path) as document:
            attachment = Attachment(document.name, document.text(), document.n_replaced)
        self._attachments.append(attachment)
        return attachment

    def drop_attachments(self) -> None:
        """Let go of the documents that wait for the next message."""
        self._attachments.clear()

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """The documents that wait for the next message."""
        return tuple(self._attachments)

    def report(self) -> KVReport:
        """The state of the cache."""
        return self._engine.report()  # type: ignore[no-any-return]

    def _answer(self, progress: Progress | None, cancel: CancelToken) -> Generator[str, None, None]:
        n_evicted = self.report().evicted
        start_s = time.perf_counter()
        n_read, n_reused = self._read(progress, cancel)
        read_s = time.perf_counter() - start_s
        self._n_prompt = self._engine.n_past
        self.n_tokens_read += n_read
        reply = self._reply = Reply()
        seed = self._draws.randrange(SEEDS)
        try:
            with ChainSampler(self._engine.context.vocab, replace(self.sampling, seed=seed)) as sampler:
                yield from write_reply(
                    self._engine,
                    sampler,
                    reply,
                    max_tokens=self.max_tokens,
                    stops=self.template.stops,
                    cancel=cancel,
                )
        finally:
            self.messages.append({"role": "assistant", "content": reply.text.strip()})
            self._tokens = list(self._engine.tokens)
            self.n_tokens_written += len(reply.tokens)
            if not reply.is_whole:
                self._prompt = None
            self.last = Turn(
                finish_reason=reply.finish_reason,
                n_read=n_read,
                n_reused=n_reused,
                n_written=len(reply.tokens),
                n_evicted=0 if self._engine.is_closed else max(0, self.report().evicted - n_evicted),
                read_s=read_s,
                write_s=time.perf_counter() - start_s - read_s,
                is_cut_by_context=reply.is_cut_by_context,
            )

    def _read(self, progress: Progress | None, cancel: CancelToken) -> tuple[int, int]:
        """Bring the cache to the point where the reply begins; return tokens read and tokens reused."""
        prompt = self.template.render(self.messages, opens_reply=True)
        n_before = self._engine.n_past
        added = self._added(prompt)
        if added is not None:
            with taken_back(self._engine, len(added)):
                self._engine.prefill(added, recall=True, progress=progress, cancel=cancel)
            self._prompt = prompt
            return len(added), n_before
        self._prompt = None
        tokens = self._tokenizer.first(prompt, self._contents(self.messages))
        pins = self._pins(prompt, tokens)
        self.pins_system = bool(pins) and self.system is not None
        n_reused = self._engine.sync(tokens, pins=[*pins, *self._pin], progress=progress, cancel=cancel)
        self._prompt = prompt
        return self._engine.n_past - n_reused, n_reused

    def _added(self, prompt: str) -> list[int] | None:
        """The tokens between what the cache says and the next reply; None if the prompt says otherwise."""
        if self._prompt is None or not prompt.startswith(self._prompt) or self._engine.tokens != self._tokens:
            return None
        rest = prompt[len(self._prompt) :]
        reply = self._reply.text
        if not rest.startswith(reply):  # the template trims what was said
            rest, reply = rest.lstrip(), reply.strip()
        if not rest.startswith(reply):
            return None
        # The last token of a reply that was cut off has been shown, but not read.
        unread = self._reply.tokens[len(self._tokens) - self._n_prompt :]
        return unread + self._tokenizer.more(rest[len(reply) :], self._contents(self.messages[-1:]))

    def _contents(self, messages: list[dict[str, str]]) -> list[str]:
        """The texts in which the name of a control token is plain text."""
        return [] if self.template.is_raw else [message["content"] for message in messages]

    def _pins(self, prompt: str, tokens: list[int]) -> list[tuple[int, int]]:
        """The tokens of the system message, and of all that the template puts around it."""
        system = self.system
        opening = self.template.opening(system)
        text = (system or "").strip()
        if not opening:
            return []
        if prompt.startswith(opening) and text in opening:
            return [(0, self._tokenizer.index(tokens, prompt, len(opening)))]
        start = prompt.find(text)
        if not text or start < 0:
            return []
        end = start + len(text)
        return [(self._tokenizer.index(tokens, prompt, start), self._tokenizer.index(tokens, prompt, end))]


def _handed_out(turn: CallTurn, pieces: Generator[str, None, None]) -> Generator[str, None, None]:
    """The pieces; while the reader has one, whoever closes the model need not wait."""
    with closing(pieces):
        for piece in pieces:
            turn.pause()
            try:
                yield piece
            finally:
                turn.resume()
