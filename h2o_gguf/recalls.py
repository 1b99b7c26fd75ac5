"""Which batches of an engine recall."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_gguf.attic import Attic

__all__ = ["Recalls"]


class Recalls:
    """Arms the next batch of a sequence.

    attic : None: nothing is ever recalled. is_on : whether batches recall; without, the attic only fills.
    """

    def __init__(self, attic: Attic | None) -> None:
        self.attic = attic
        self.is_on = True
        self.is_armed = False

    def may_follow(self, n_past: int, budget: int) -> bool:
        """Whether there will be something to recall at a position.  budget : entries that are kept."""
        return self.is_on and self.attic is not None and (not self.attic.is_empty or n_past > budget)

    def begin_turn(self) -> None:
        """Count what is recalled from here on."""
        if self.attic is not None:
            self.attic.begin_turn()

    def arm(self, n_past: int, pins: Sequence[tuple[int, int]]) -> None:
        """Let the batch at n_past recall.  pins : spans that stay in the cache."""
        if self.is_on and self.attic is not None and not self.attic.is_empty:
            self.attic.recall_next(n_past, pins)
            self.is_armed = True

    def arm_generated(self, n: int, n_past: int, pins: Sequence[tuple[int, int]]) -> None:
        """The same for the n-th generated token, if its turn has come."""
        every = self.attic.interval() if self.attic is not None else 0
        if every and n % every == 0:
            self.arm(n_past, pins)

    @property
    def n_asking(self) -> int:
        """How often the batch at hand only asks for what it recalls: see Attic."""
        return self.attic.n_asking if self.is_armed and self.attic is not None else 0

    def exchange_asked(self, n_past: int, pins: Sequence[tuple[int, int]], *, asks_again: bool) -> None:
        """Exchange what the batch at n_past asked for before it was rolled back."""
        if self.attic is not None:
            self.attic.exchange_asked(is_counted=not asks_again)
            if asks_again:
                self.attic.recall_next(n_past, pins)

    def disarm(self) -> bool:
        """Return whether the batch at hand recalls; the next one does not."""
        was, self.is_armed = self.is_armed, False
        return was
