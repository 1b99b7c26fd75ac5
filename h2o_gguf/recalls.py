"""Which batches of an engine recall."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_gguf.attic import Asking, Attic

__all__ = ["Recalls"]


class Recalls:
    """Arms the next batch of a sequence.

    attic : None: nothing is ever recalled. is_on : whether batches recall; without, the attic only fills.
    """

    def __init__(self, attic: Attic | None) -> None:
        self.attic = attic
        self.is_on = True
        self._armed: Asking | None = None

    def may_follow(self, n_past: int, budget: int) -> bool:
        """Whether there will be something to recall at a position.  budget : entries that are kept."""
        return self.is_on and self.attic is not None and (not self.attic.is_empty or n_past > budget)

    def begin_turn(self) -> None:
        """Count what is recalled from here on."""
        if self.attic is not None:
            self.attic.begin_turn()

    @property
    def is_armed(self) -> bool:
        """Whether the next batch recalls."""
        return self._armed is not None

    def arm(self, n_past: int, pins: Sequence[tuple[int, int]], asking: Asking = "question") -> None:
        """Let the batch at n_past recall.  pins : spans that stay in the cache. asking : see Attic."""
        if not self.is_on or self.attic is None or self.attic.is_empty:
            return
        if asking == "text" and self.attic.n_asking:
            return  # a text would be read three times
        self.attic.recall_next(n_past, pins, asking)
        self._armed = asking

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

    def disarm(self) -> Asking | None:
        """Return how the batch at hand recalls, if it does; the next one does not."""
        was, self._armed = self._armed, None
        return was
