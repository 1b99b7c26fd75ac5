"""Which batches of an engine recall."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from h2o_gguf.attic import Asking, Attic

__all__ = ["Recalls"]


class Recalls:
    """Arms the batches of a sequence that recall, and no others.

    attic : None: nothing is ever recalled. is_on : whether batches recall; without, the attic only fills.
    """

    def __init__(self, attic: Attic | None) -> None:
        self.attic = attic
        self.is_on = True
        self._is_armed = False  # or may be: Ctrl-C came before a batch, or while the attic was told

    @property
    def has_any(self) -> bool:
        """Whether there is something to recall now."""
        return self.is_on and self.attic is not None and not self.attic.is_empty

    def may_follow(self, n_past: int) -> bool:
        """Whether there may be something to recall by the time that a batch up to a position is computed."""
        return self.is_on and self.attic is not None and self.attic.may_hold_any(n_past)

    def begin_turn(self) -> None:
        """Count what is recalled from here on."""
        if self.attic is not None:
            self.attic.begin_turn()

    def n_question(self, pins: Sequence[tuple[int, int]], end: int, n_batch: int) -> int:
        """The newest tokens of what is asked up to a position: see Attic; 0: nothing recalls."""
        if not self.may_follow(end) or self.attic is None:
            return 0
        return self.attic.n_question(pins, end, n_batch)

    def is_due(self, n: int) -> bool:
        """Whether the n-th generated token recalls."""
        every = self.attic.interval() if self.attic is not None else 0
        return every > 0 and n % every == 0 and self.has_any

    @property
    def n_asking(self) -> int:
        """How often a batch that recalls only asks for it: see Attic."""
        return self.attic.n_asking if self.attic is not None else 0

    def granted(self, asking: Asking | None, end: int) -> Asking | None:
        """How a batch up to a position recalls that asks so, if it does; it may be the first to evict."""
        if self.attic is None or not (self.has_any or (self.n_asking == 0 and self.may_follow(end))):
            return None
        return asking if asking != "text" or self.attic.serves_texts else None

    @contextmanager
    def armed(self, asking: Asking | None, n_past: int, pins: Sequence[tuple[int, int]]) -> Iterator[None]:
        """In the with-block the batch at n_past is decoded: the only one that recalls, if any does.

        asking : how; None: not at all. pins : spans that stay in the cache.
        """
        self.withdraw()
        try:
            if asking is not None and self.attic is not None:
                self._is_armed = True
                self.attic.recall_next(n_past, pins, asking)
            yield
        finally:
            self.withdraw()

    def withdraw(self) -> None:
        """Let no batch recall that was armed and never decoded."""
        if self._is_armed and self.attic is not None:
            self.attic.withdraw()
            self._is_armed = False

    def exchange_asked(self, *, is_counted: bool) -> None:
        """Exchange what a batch asked for before it was rolled back.  is_counted : by the turn."""
        if self.attic is not None:
            self.attic.exchange_asked(is_counted=is_counted)
