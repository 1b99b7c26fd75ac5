"""Reads and writes tokens inside a KV budget."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence

from h2o_gguf.align import align
from h2o_gguf.attic import N_QUESTION_MOST, N_TEXT, Asking
from h2o_gguf.batches import batches
from h2o_gguf.cancel import CancelToken
from h2o_gguf.decoding import Decoder
from h2o_gguf.drafts import Draft, Guesses
from h2o_gguf.errors import Cancelled, ContextOverflowError, OptionError
from h2o_gguf.pins import Span
from h2o_gguf.protocols import Progress, Sampler

__all__ = ["Engine"]


class Engine(Decoder):
    """Makes a sequence say what it shall: a prompt, and what follows.

    cancelled : whether the last generation was cut off by its token.
    """

    cancelled = False

    def sync(
        self,
        tokens: Sequence[int],
        *,
        pins: Sequence[Span] | None = None,
        recall: bool = True,
        progress: Progress | None = None,
        cancel: CancelToken | None = None,
    ) -> int:
        """Make the sequence say `tokens`, ready for the next; return how many cached tokens were kept.

        Cached tokens that spell the same bytes as the prompt's stay in place of them. What differs is rolled
        back where that is exact; else everything is read again.

        pins : spans of the prompt to pin, in its own indices; None leaves the pins alone. recall : what is
            read fetches back evicted entries, as prefill() says.

        Raises: ContextOverflowError before anything changes; Cancelled, with all read so far kept.
        """
        self._require_open()
        prompt = [int(token) for token in tokens]
        if not prompt:
            raise OptionError("the prompt has no tokens: give at least one", "prompt")
        self.context.vocab.check(prompt)
        self.settle()
        match = align(self.tokens, prompt, self.context.vocab.text_piece)
        n_total = match.n_cached + len(prompt) - match.n_prompt
        if n_total >= self.n_ctx:
            raise ContextOverflowError(n_total, self.n_ctx, evicts=self.policy is not None)
        kept, rest = match.n_cached, prompt[match.n_prompt :]
        marked = self._mark is not None and self._mark[0] == kept
        if not rest and not marked and (kept < self.n_past or self._logits is None):
            kept, rest = kept - 1, self.tokens[kept - 1 : kept]  # its logits are needed again
        spans = self._pins
        if pins is not None:
            moved = [(match.position(start), match.position(end, end=True)) for start, end in pins]
            spans = self.checked_pins(moved)
        if not self.rollback(kept):
            kept, rest = 0, prompt
            if pins is not None:
                spans = self.checked_pins(pins)
            self.reset()
        self.pins = spans
        if rest:
            self.prefill(rest, recall=recall, progress=progress, cancel=cancel)
        return kept

    def prefill(
        self,
        tokens: Sequence[int],
        *,
        recall: bool = False,
        progress: Progress | None = None,
        cancel: CancelToken | None = None,
    ) -> None:
        """Append tokens, any number of them, a ubatch at a time.

        recall : where there is an attic, the last of them are a question, which fetches back what its answer
            may need; all others fetch what they attend to themselves.
        progress : called with (tokens read, tokens in all) after each ubatch.

        Raises: ContextOverflowError before anything is read; Cancelled, with all read so far kept.
        """
        self._require_open()
        todo = [int(token) for token in tokens]
        self.context.vocab.check(todo)
        self.settle()
        if self.n_past + len(todo) > self.n_ctx:
            n_total = self.n_past + len(todo)
            raise ContextOverflowError(n_total, self.n_ctx, evicts=self.policy is not None)
        try:
            first = len(todo) - self._n_question(len(todo)) if recall else len(todo)  # of the question
            if recall and first == len(todo):
                self.recalls.begin_turn()  # in which nothing is recalled
            for start, end in batches(len(todo), self.context.n_batch, len(todo) - first):
                if cancel is not None and cancel.cancelled:
                    raise Cancelled(f"cancelled after {start} of {len(todo)} prompt tokens")
                asking: Asking | None = None
                if start >= first:
                    asking = "question"
                    if start == first:
                        self.recalls.begin_turn()
                elif end - start >= min(N_TEXT, self.context.n_batch):
                    asking = "text"
                self._decode(todo[start:end], cancel, asking)
                if self._evictor is not None:
                    self._evictor.n_prompt = self.n_past
                if progress is not None:
                    progress(end, len(todo))
        except BaseException:
            self._mark_end()
            with contextlib.suppress(Exception):  # the error on its way says more
                self.keep_budget()
            raise
        self._mark_end()
        self.keep_budget()

    def generate(
        self,
        sampler: Sampler,
        *,
        max_tokens: int | None = None,
        cancel: CancelToken | None = None,
        draft: Draft | None = None,
    ) -> Generator[int, None, None]:
        """Yield sampled tokens; each enters the sequence when the next is asked for.

        draft : guesses tokens, which are evaluated together; the result is the same as without.

        Ends after max_tokens (None: no limit), at the end of the context, when no token is allowed, or when
        cancelled (`cancelled` says so). End-of-text tokens are yielded like others: the caller stops there.
        """
        self._require_open()
        self.settle()
        self.cancelled = False
        if self._evictor is not None:
            self._evictor.n_prompt = min(self._evictor.n_prompt, self.n_past)
        guesses = Guesses(draft)
        n = 0
        try:
            while max_tokens is None or n < max_tokens:
                if cancel is not None and cancel.cancelled:
                    self.cancelled = True
                    return
                if self._logits is None:
                    raise OptionError("nothing has been read yet: give a prompt first", "prompt")
                token = sampler.sample(self._logits, self._log.array())
                if token is None:
                    return
                sampler.accept(token)
                yield token
                self._require_open()
                n += 1
                if n == max_tokens or self.n_past + 1 >= self.n_ctx:
                    return
                try:
                    self._advance(token, guesses, cancel, recalls=self.recalls.is_due(n))
                except Cancelled:
                    self.cancelled = True
                    return
        finally:
            if not self.is_closed:
                self.settle()  # takes back what was guessed ahead
                self.keep_budget()

    def recall(self, n_tokens: int = N_QUESTION_MOST) -> None:
        """Let the newest tokens fetch back what they attend to: they are read again.

        n_tokens : how many, fewer where forgetting them would not be exact. Those that an error or Ctrl-C
            keeps from being read again are gone.

        Raises: OptionError, there is no attic, or not one of them can be read again.
        """
        self._require_open()
        self.settle()
        if self.attic is None or self.cache is None:
            raise OptionError("nothing can be recalled without an attic: give attic='ram'", "attic")
        n = min(n_tokens, self.n_past - self.cache.rollback_min())
        again = self.tokens[self.n_past - n :] if n > 0 else []
        self.context.vocab.check(again)  # parts of an image cannot be read again
        if not again or not self.rollback(self.n_past - n):
            raise OptionError("the newest token cannot be read again here, so nothing can be recalled")
        self.prefill(again, recall=True)

    def _n_question(self, n: int) -> int:
        """How many of the next n tokens are what is asked; with a rest that is too short for a text."""
        n_question = min(n, self.recalls.n_question(self._pins, self.n_past + n, self.context.n_batch))
        return n if n_question > 0 and n - n_question < N_TEXT else n_question

    def _advance(self, token: int, guesses: Guesses, cancel: CancelToken | None, *, recalls: bool) -> None:
        """Enter one token into the sequence: evaluated ahead, or now together with new guesses."""
        if recalls:
            guesses.clear()  # what was evaluated ahead did not see what comes back now
            self.settle()
            self._decode([token], cancel, "reply")
            return
        row = guesses.take(token)
        if row is not None:
            self._enter([token], row[None, :])
            return
        self.settle()
        n_max = min(self.context.n_batch - 1, self.n_ctx - self.n_past - 1)
        if self.policy is not None:
            n_max = min(n_max, self.policy.n_recent)  # so that taking them back is exact
        ahead = guesses.ask(self._log.array(), token, n_max, self.context.vocab.n_tokens)
        if not ahead:
            self._decode([token], cancel)
            return
        rows = self._evaluate([token, *ahead], cancel, all_logits=True)
        self._enter([token], rows[:1])
        guesses.put(ahead, list(rows[1:]))
