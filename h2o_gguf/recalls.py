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

    def may_follow(self, n_past: int, budget: int) -> bool:
        """Whether there will be something to recall at a position.  budget : entries that are kept."""
        return self.is_on and self.attic is not None and (not self.attic.is_empty or n_past > budget)

    def begin_turn(self) -> None:
        """Count what is recalled from here on."""
        if self.attic is not None:
            self.attic.begin_turn()

    def n_question(self, pins: Sequence[tuple[int, int]], n_past: int) -> int:
        """The newest tokens of what is asked, a batch of their own: see Attic; 0: nothing recalls."""
        return self.attic.n_question(pins, n_past) if self.is_on and self.attic is not None else 0

    def is_due(self, n: int) -> bool:
        """Whether the n-th generated token recalls."""
        every = self.attic.interval() if self.attic is not None else 0
        return every > 0 and n % every == 0 and self.has_any

    @property
    def n_asking(self) -> int:
        """How often a batch that recalls only asks for it: see Attic."""
        return self.attic.n_asking if self.attic is not None else 0

    def granted(self, asking: Asking | None) -> Asking | None:
        """How a batch recalls that asks so, if it does."""
        if self.attic is None or not self.has_any:
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
