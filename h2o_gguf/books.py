"""The books of a sequence: what it says, and what its context and its cache hold of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.attic import Asking, Attic
from h2o_gguf.bookmarks import Bookmarks
from h2o_gguf.errors import ClosedError, OptionError
from h2o_gguf.eviction import Evictor, NativeCache
from h2o_gguf.pins import Span, check_pins
from h2o_gguf.policies import Policy
from h2o_gguf.protocols import UNBOUNDED, Logits
from h2o_gguf.recalls import Recalls
from h2o_gguf.saved_traces import SavedTraces
from h2o_gguf.token_log import TokenLog
from h2o_gguf.view import CacheView

if TYPE_CHECKING:
    from h2o_gguf.context import Context

__all__ = ["Books"]

OnLogits = Callable[[int, Logits], None]  # gets the position of the first row, and the rows
OnRecall = Callable[[CacheView, int, Asking], None]  # gets the cache after a batch, its length, how it asked
OnAdopt = Callable[[], None]


class Books:
    """Of one sequence in one llama.cpp context, evicted from as its policy says.

    tokens : every token of the sequence since the last reset, evicted ones included: those the context has
        seen, no more and no less.
    cache : the native cache, None when nothing is ever evicted.
    pins : position spans that are never victims.
    recalls : which batches fetch evicted entries back, and from where.
    n_ctx : most tokens of a sequence; UNBOUNDED with eviction, unless positions cannot be renumbered.
    on_logits : told of every batch. on_recall : told after a batch that fetched entries back, of 0 tokens
        where it failed. on_adopt : told when another sequence has taken the place of the one before.
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
        self.on_logits: OnLogits | None = None
        self.on_recall: list[OnRecall] = []
        self.on_adopt: list[OnAdopt] = []
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
        self._pins = self.checked_pins(spans)
        if self._evictor is not None:
            self._evictor.pins = self._pins

    def checked_pins(self, spans: Sequence[Span]) -> tuple[Span, ...]:
        """The spans as `pins` would have them; nothing changes.  Raises: BudgetError, they do not fit."""
        return check_pins(spans, self.policy) if self.policy is not None else tuple(spans)

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
        self.recalls.withdraw()
        self.recalls.begin_turn()

    def rollback(self, n_past: int) -> bool:
        """Forget all tokens from position n_past on; False, and nothing forgotten, where that is inexact."""
        self._require_open()
        self.settle()
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

    def traces(self) -> tuple[SavedTraces, ...]:
        """What the policy keeps of every entry, for `adopt`."""
        return self._evictor.saved_traces() if self._evictor is not None else ()

    def adopt(self, tokens: Sequence[int], logits: Logits | None, traces: Sequence[SavedTraces] = ()) -> None:
        """Take over a sequence the context was given by other means (a loaded session).

        traces : what this policy kept of its entries.
        """
        self._log.shorten(0)  # until all the rest is true, there is no sequence
        self._logits = logits
        self._mark = (len(tokens), logits) if logits is not None else None
        if self._evictor is not None:
            self._evictor.take_over(len(tokens), traces)
        self.recalls.begin_turn()
        self._log.extend(tokens)
        for listener in self.on_adopt:
            listener()

    def bookmarks(self) -> Bookmarks:
        """What to go back to, where the tokens and entries of now will be there again."""
        notes = self._evictor.notes() if self._evictor is not None else None
        n_before_turn = self.attic.n_before_turn if self.attic is not None else 0
        return Bookmarks(self._pins, self._logits, self._mark, notes, n_before_turn)

    def go_back_to(self, bookmarks: Bookmarks) -> None:
        """The tokens and entries are those of then again, and so is all the rest."""
        self.pins = bookmarks.pins
        self._logits, self._mark = bookmarks.logits, bookmarks.mark
        if self._evictor is not None and bookmarks.notes is not None:
            self._evictor.go_back_to(bookmarks.notes)
        if self.attic is not None:
            self.attic.n_before_turn = bookmarks.n_before_turn

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

    def settle(self) -> None:
        """Make the books agree with the context after a call that was torn off (Ctrl-C, a foreign call)."""
        if self.context.n_past() == self.n_past:
            return
        if not (self.context.n_past() > self.n_past > 0 and self._remove_from(self.n_past)):
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


def _context(ctx: Any, model: Any) -> Context:
    from h2o_gguf.context import Context

    return Context(ctx, model)
