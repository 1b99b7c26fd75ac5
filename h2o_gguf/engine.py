"""Reads and writes tokens inside a KV budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.align import align
from h2o_gguf.attic import N_TURN, Attic
from h2o_gguf.batches import batches
from h2o_gguf.cancel import CancelToken
from h2o_gguf.drafts import Draft, Guesses
from h2o_gguf.errors import (
    CacheFullError,
    Cancelled,
    ClosedError,
    ContextOverflowError,
    NativeError,
    OptionError,
)
from h2o_gguf.eviction import Evictor, NativeCache, OnEvict, Span, check_pins, room_failure
from h2o_gguf.policies import LayerBudgets, Policy, Split
from h2o_gguf.protocols import UNBOUNDED, Logits, Progress, Sampler
from h2o_gguf.recalls import Recalls
from h2o_gguf.report import KVReport
from h2o_gguf.saved_traces import SavedTraces
from h2o_gguf.token_log import TokenLog
from h2o_gguf.view import CacheView

if TYPE_CHECKING:
    from h2o_gguf.context import Context

__all__ = ["UNBOUNDED", "Engine", "Progress", "Sampler"]

OnRecall = Callable[[CacheView, int], None]  # gets the cache after the batch, and how many tokens that had

# What llama_decode returns.
DECODE_NO_ROOM = 1
DECODE_ABORTED = 2
DECODE_NO_VICTIMS = -100  # H2OG_DECODE_FAILED: room could not be made


class Engine:
    """One sequence in one llama.cpp context, evicted from as its policy says.

    tokens : every token of the sequence since the last reset, evicted ones included: those the context has
        seen, no more and no less.
    cache : the native cache, None when nothing is ever evicted.
    pins : position spans that are never victims.
    recalls : which batches fetch evicted entries back, and from where.
    n_ctx : most tokens of a sequence; UNBOUNDED with eviction, unless positions cannot be renumbered.
    """

    def __init__(
        self,
        ctx: Any,
        model: Any = None,
        policy: Policy | None = None,
        *,
        n_ctx: int | None = None,
        cache: NativeCache | None = None,
        kv_bytes: int = 0,
        attic: Attic | None = None,
    ) -> None:
        """ctx, model : llama.cpp pointers, or ctx a Context; both outlive the engine.

        policy, cache : both or neither.  kv_bytes : size of the KV memory when there is no cache to ask.
        """
        self.context: Context = ctx if model is None else _context(ctx, model)
        self.cache = cache
        self.policy = policy if cache is not None else None
        self.n_ctx = (
            n_ctx if n_ctx is not None else (UNBOUNDED if cache is not None else self.context.n_cells)
        )
        self._log = TokenLog()
        self.is_closed = False
        self.cancelled = False  # whether the last generation was cut off by its token
        self.on_logits: Callable[[int, Logits], None] | None = None  # gets (position, rows) of every batch
        self.on_recall: list[OnRecall] = []  # told after a batch that fetched entries back
        self.recalls = Recalls(attic)
        self._kv_bytes = kv_bytes
        self._pins: tuple[Span, ...] = ()
        self._logits: Logits | None = None  # after the last token; None when they must be computed
        self._mark: tuple[int, Logits] | None = None  # end of the last prompt and the logits there
        self._evictor = Evictor(self.policy) if self.policy is not None else None
        if cache is not None and self._evictor is not None:
            self._evictor.attach(cache)

    @property
    def attic(self) -> Attic | None:
        """Where evicted entries stay; None where they are lost."""
        return self.recalls.attic

    @property
    def tokens(self) -> list[int]:
        """The tokens so far; not to be changed from outside."""
        return self._log.tokens

    @property
    def token_array(self) -> NDArray[np.intc]:
        """The tokens so far: int32[n_past], read-only, valid until the next change."""
        return self._log.array()

    @property
    def n_past(self) -> int:
        """The next position."""
        return len(self._log)

    @property
    def pins(self) -> list[Span]:
        """The pinned spans, sorted and merged."""
        return list(self._pins)

    @pins.setter
    def pins(self, spans: Sequence[Span]) -> None:
        self._pins = check_pins(spans, self.policy) if self.policy is not None else tuple(spans)
        if self._evictor is not None:
            self._evictor.pins = self._pins

    @property
    def on_evict(self) -> list[OnEvict]:
        """Who is told of every eviction before it happens: (what the policy saw, its victims).

        To be appended to and removed from; without a policy nobody is told.
        """
        return self._evictor.on_evict if self._evictor is not None else []

    def view(self) -> CacheView | None:
        """The cache as the policy would see it now; None without one."""
        if self.cache is None or self._evictor is None:
            return None
        return self._evictor.view(self.cache.view())

    @property
    def logits(self) -> Logits | None:
        """Logits after the last token, float32[n_vocab]; None before the first and after a rollback."""
        return self._logits

    def reset(self) -> None:
        """Forget the sequence; pins stay."""
        self._require_open()
        self.context.clear()
        self._shorten(0)
        self._logits = self._mark = None
        self.recalls.disarm()
        self.recalls.begin_turn()

    def rollback(self, n_past: int) -> bool:
        """Forget all tokens from position n_past on; False, and nothing forgotten, where that is inexact."""
        self._require_open()
        self._settle()
        if n_past < 0 or n_past > self.n_past:
            raise OptionError(
                f"cannot roll back to position {n_past}: the sequence has {self.n_past}", "n_past"
            )
        if n_past == self.n_past:
            self._recall_logits()
            return True
        if n_past == 0:
            self.reset()
            return True
        if not self._remove_from(n_past):
            return False
        self._shorten(n_past)
        self._logits = None
        if self._mark is not None and self._mark[0] > n_past:
            self._mark = None
        self._recall_logits()
        return True

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
        self._settle()
        match = align(self.tokens, prompt, self.context.vocab.text_piece)
        n_total = match.n_cached + len(prompt) - match.n_prompt
        if n_total >= self.n_ctx:
            raise ContextOverflowError(n_total, self.n_ctx)
        kept, rest = match.n_cached, prompt[match.n_prompt :]
        marked = self._mark is not None and self._mark[0] == kept
        if not rest and not marked and (kept < self.n_past or self._logits is None):
            kept, rest = kept - 1, self.tokens[kept - 1 : kept]  # its logits are needed again
        if pins is not None:
            spans = [(match.position(start), match.position(end, end=True)) for start, end in pins]
            self.pins = spans
        if not self.rollback(kept):
            kept, rest = 0, prompt
            self.reset()
            if pins is not None:
                self.pins = list(pins)
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

        recall : where there is an attic, the last of them, a question as a rule, fetch back what they attend
            to. progress : called with (tokens read, tokens in all) after each ubatch.

        Raises: ContextOverflowError before anything is read; Cancelled, with all read so far kept.
        """
        self._require_open()
        todo = [int(token) for token in tokens]
        self.context.vocab.check(todo)
        self._settle()
        if self.n_past + len(todo) > self.n_ctx:
            raise ContextOverflowError(self.n_past + len(todo), self.n_ctx)
        try:
            for start, end in self._batches(len(todo), recall) if todo else ():
                if cancel is not None and cancel.cancelled:
                    raise Cancelled(f"cancelled after {start} of {len(todo)} prompt tokens")
                if recall and end == len(todo):
                    self.recalls.begin_turn()
                    self.recalls.arm(self.n_past, self._pins)
                self._decode(todo[start:end], cancel)
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
        self._settle()
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
                self.recalls.arm_generated(n, self.n_past, self._pins)
                try:
                    self._advance(token, guesses, cancel)
                except Cancelled:
                    self.cancelled = True
                    return
        finally:
            if not self.is_closed:
                logits = self._logits
                self._settle()  # takes back what was guessed ahead
                self._logits = logits if self.n_past else None
                self.keep_budget()

    def recall(self, n_tokens: int = N_TURN) -> None:
        """Let the newest tokens fetch back what they attend to: they are read again.

        n_tokens : how many, fewer where forgetting them would not be exact.

        Raises: OptionError, there is no attic, or not one of them can be read again.
        """
        self._require_open()
        self._settle()
        if self.attic is None or self.cache is None:
            raise OptionError("nothing can be recalled without an attic: give attic='ram'", "attic")
        n = min(n_tokens, self.n_past - self.cache.rollback_min())
        again = self.tokens[self.n_past - n :] if n > 0 else []
        if not again or not self.rollback(self.n_past - n):
            raise OptionError("the newest token cannot be read again here, so nothing can be recalled")
        self.prefill(again, recall=True)

    def _batches(self, n: int, recall: bool) -> list[tuple[int, int]]:
        """The batches that n tokens are read in; those that recall come in one of their own."""
        budget = self.policy.budget if self.policy is not None else 0
        recalls = recall and self.recalls.may_follow(self.n_past + n, budget)
        return batches(n, self.context.n_batch, N_TURN if recalls else 0)

    def holds_all(self, n_tokens: int) -> bool:
        """Whether nothing was evicted, and n_tokens more can be read and rolled back before anything is."""
        if self.cache is None or self.context.n_swa > 0:  # whose rows go without us
            return False
        n_total = self.n_past + n_tokens
        return self.cache.rollback_min() == 0 and all(n_total <= group.budget for group in self.cache.groups)

    def keep_budget(self) -> None:
        """Evict down to the budget, so that a cache at rest is within it."""
        if self.cache is None or self.policy is None:
            return
        try:
            self.cache.make_room(self.policy.budget)
        except Exception:
            self._raise_policy_error()
            raise

    def evict(self, policy: Policy) -> None:
        """Evict once, down to the budget of another policy and as that one says; the engine's own stays.

        policy : of the same decay, scores, observed queries and traces as the engine's.
        """
        if self.cache is None or self._evictor is None:
            raise OptionError("nothing can be evicted from a context without an eviction cache", "policy")
        own = self.policy, self._evictor
        self.policy, self._evictor = policy, self._evictor.successor(policy)
        self.cache.set_policy(self._evictor)
        try:
            self.keep_budget()
        finally:
            self.policy, self._evictor = own
            self.cache.set_policy(self._evictor)

    def report(self) -> KVReport:
        """The state of the cache."""
        if self.cache is None or self.policy is None:
            n_used = min(self.n_past, self.context.n_cells)
            return KVReport(
                "none", min(self.n_ctx, self.context.n_cells), n_used, 0, self.n_past, self._kv_bytes,
                used_bytes=self._kv_bytes * n_used // max(1, self.context.n_cells),
            )  # fmt: skip
        by_layer = self.policy.budgets if isinstance(self.policy, LayerBudgets) else ()
        return KVReport(
            policy=self.policy.name,
            budget=self.cache.budget,
            used=self.cache.used(),
            evicted=self.cache.n_evicted,
            n_past=self.n_past,
            bytes=self.cache.kv_bytes,
            n_rebases=self.cache.n_rebases,
            used_bytes=self.cache.used_bytes,
            layer_budgets=() if isinstance(by_layer, Split) else tuple(by_layer),
            attic=self.attic.report() if self.attic is not None else None,
        )

    def traces(self) -> tuple[SavedTraces, ...]:
        """What the policy keeps of every entry, for `adopt`."""
        if self.cache is None or self._evictor is None:
            return ()
        return self._evictor.saved_traces(self.cache)

    def adopt(self, tokens: Sequence[int], logits: Logits | None, traces: Sequence[SavedTraces] = ()) -> None:
        """Take over a sequence the context was given by other means (a loaded session).

        traces : what this policy kept of its entries.
        """
        self._log.shorten(0)
        self._log.extend(tokens)
        self._logits, self._mark = logits, None
        if logits is not None:
            self._mark = (self.n_past, logits)
        if self._evictor is not None:
            self._evictor.take_over(self.n_past, traces)
        self.recalls.begin_turn()

    def close(self) -> None:
        """Detach from the context; may be called twice."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.cache is not None:
            self.cache.close()
        self.context.close()
        self._logits = self._mark = None

    def _require_open(self) -> None:
        if self.is_closed:
            raise ClosedError("the engine")

    def _settle(self) -> None:
        """Make the books agree with the context after a call that was torn off (Ctrl-C, a foreign call)."""
        if self.context.n_past() == self.n_past:
            return
        if self.context.n_past() > self.n_past > 0 and self._remove_from(self.n_past):
            self._logits = None
            return
        self.reset()

    def _shorten(self, n_past: int) -> None:
        self._log.shorten(n_past)
        if self._evictor is not None:
            self._evictor.drop_from(n_past)

    def _remove_from(self, n_past: int) -> bool:
        if self.cache is not None and n_past < self.cache.rollback_min():
            return False
        return self.context.remove_from(n_past)

    def _mark_end(self) -> None:
        self._mark = (self.n_past, self._logits) if self._logits is not None else None

    def _recall_logits(self) -> None:
        if self._logits is None and self._mark is not None and self._mark[0] == self.n_past:
            self._logits = self._mark[1]

    def _advance(self, token: int, guesses: Guesses, cancel: CancelToken | None) -> None:
        """Enter one token into the sequence: evaluated ahead, or now together with new guesses."""
        if self.recalls.is_armed:
            guesses.clear()  # what was evaluated ahead did not see what comes back now
            self._settle()
            self._decode([token], cancel)
            return
        row = guesses.take(token)
        if row is not None:
            self._enter([token], row[None, :])
            return
        self._settle()
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

    def _decode(self, tokens: Sequence[int], cancel: CancelToken | None) -> None:
        """Evaluate one batch and enter it into the books."""
        self._enter(tokens, self._evaluate(tokens, cancel, all_logits=self.on_logits is not None))

    def _enter(self, tokens: Sequence[int], rows: Logits) -> None:
        start = self.n_past
        self._log.extend(tokens)
        self._logits = rows[-1]
        if self.on_logits is not None:
            self.on_logits(start, rows)

    def _evaluate(self, tokens: Sequence[int], cancel: CancelToken | None, *, all_logits: bool) -> Logits:
        """Evaluate one batch; return its logits, of the last token only unless all_logits."""
        self._logits = None
        asks_first = self.recalls.asks_first
        recalls = self.recalls.disarm()
        code = self.context.decode(tokens, self.n_past, all_logits=all_logits, cancel=cancel)
        if code == 0 and asks_first and self._remove_from(self.n_past):
            self.recalls.exchange_asked()
            code = self.context.decode(tokens, self.n_past, all_logits=all_logits, cancel=cancel)
        is_policys = self._evictor is not None and self._evictor.has_error
        if code == 0 and not is_policys:
            if recalls:
                self._tell_recall(len(tokens))
            return self.context.logits(len(tokens) if all_logits else 1)
        reason = room_failure() if code == DECODE_NO_VICTIMS and not is_policys else ""
        self._settle()
        self._raise_policy_error()
        if reason:
            raise NativeError(f"cannot make room for {len(tokens)} tokens: {reason}", code)
        if code == DECODE_ABORTED:
            raise Cancelled(f"cancelled at position {self.n_past}")
        if code == DECODE_NO_ROOM:
            n_used = self.cache.used() if self.cache is not None else self.n_past
            raise CacheFullError(n_used, self.context.n_cells)
        raise NativeError(
            f"llama_decode returned {code} for {len(tokens)} tokens at position {self.n_past}", code
        )

    def _tell_recall(self, n_tokens: int) -> None:
        view = self.view() if self.on_recall else None
        if view is not None:
            for listener in self.on_recall:
                listener(view, n_tokens)

    def _raise_policy_error(self) -> None:
        if self._evictor is not None:
            self._evictor.raise_error()


def _context(ctx: Any, model: Any) -> Context:
    from h2o_gguf.context import Context

    return Context(ctx, model)
