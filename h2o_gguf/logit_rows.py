"""Logits of every position of a sequence, for logits_all."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["LogitRows"]

N_FIRST = 256  # rows there is room for at first


class LogitRows:
    """A row for each token that was evaluated here; NaN for those of a session, or that others evaluated."""

    def __init__(self, n_vocab: int) -> None:
        self._rows = np.empty((0, n_vocab), np.single)
        self._n = 0  # rows that are of the sequence; behind them may be those of another

    def put(self, start: int, rows: NDArray[np.single]) -> None:
        """The rows of the positions from start on, where the sequence ends.  rows : float32[n, n_vocab]."""
        self._fill(start)
        self._reserve(start + len(rows))
        self._rows[start : start + len(rows)] = rows
        self._n = start + len(rows)

    def shorten(self, n: int) -> None:
        """Know the first n rows, at most."""
        self._n = min(self._n, n)

    def first(self, n: int) -> NDArray[np.single]:
        """Of n tokens: float32[n, n_vocab], to be read before the next change."""
        self._fill(n)
        return self._rows[:n]

    def _fill(self, n: int) -> None:
        """Have n rows, NaN where nothing is known."""
        self._reserve(n)
        self._rows[self._n : n] = np.nan
        self._n = max(self._n, n)

    def _reserve(self, n: int) -> None:
        if n > len(self._rows):
            grown = np.empty((max(n, 2 * len(self._rows), N_FIRST), self._rows.shape[1]), np.single)
            grown[: self._n] = self._rows[: self._n]
            self._rows = grown
