"""Numbers a policy keeps for every entry, carried along as entries move, leave and arrive."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.saved_traces import SavedTraces

__all__ = ["Traces"]

N_POSITIONS = 2**31  # positions are int32
NONE = np.int32(-2)  # neither a position nor an empty cell


class Traces:
    """n_trace numbers per entry, found again by layer, head and position, whatever cell it lies in.

    n_seen : queries before this position are in the numbers, or will never be.
    """

    def __init__(self, n_trace: int, n_seen: int = 0) -> None:
        self.n_trace = n_trace
        self.n_seen = n_seen
        self._pos: NDArray[np.int32] | None = None  # of the cells when numbers were last put
        self._numbers = np.zeros((n_trace, 0, 0, 0), np.float32)  # of those cells

    def drop_from(self, n_past: int) -> None:
        """Forget the entries at positions >= n_past: they were rolled back, others may take their place."""
        if self._pos is not None and n_past < self.n_seen:
            self._pos = np.where(self._pos < n_past, self._pos, NONE)
        self.n_seen = min(self.n_seen, n_past)

    def at(self, pos: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the numbers of the entries that cells hold now, 0 for new ones and in empty cells.

        pos : int32[n_layer, n_head_kv, n_cells], -1 empty.  Returns: float32[n_trace, *pos.shape].
        """
        if self._pos is None or self._pos.shape[:2] != pos.shape[:2]:
            return np.zeros((self.n_trace, *pos.shape), np.float32)
        found: NDArray[np.float32]
        if self._pos.shape == pos.shape:
            # An entry that moved left one changed cell for another, so few have to be looked for.
            was = now = np.flatnonzero((self._pos != pos) | (pos < 0))
            found = self._numbers.copy()
        else:  # those of a session, saved without empty cells
            was, now = np.arange(self._pos.size), np.arange(pos.size)
            found = np.zeros((self.n_trace, *pos.shape), np.float32)
        numbers, there = self._numbers.reshape(self.n_trace, -1), found.reshape(self.n_trace, -1)
        there[:, now] = 0
        left, taken = _held(self._pos, was, self.n_seen), _held(pos, now, self.n_seen)
        _, at, to = np.intersect1d(
            _ids(self._pos, left), _ids(pos, taken), assume_unique=True, return_indices=True
        )
        there[:, taken[to]] = numbers[:, left[at]]
        return found

    def save(self, layers: tuple[int, ...], pos: NDArray[np.int32]) -> SavedTraces:
        """The numbers of the entries that cells hold now.  layers : theirs. pos : as for `at`."""
        is_used = (pos >= 0).any((0, 1))
        return SavedTraces(layers, self.n_seen, pos[..., is_used], self.at(pos)[..., is_used])

    def put(self, pos: NDArray[np.int32], numbers: NDArray[np.floating[Any]], n_past: int) -> None:
        """Keep the numbers of the entries that cells hold now, and of no others.

        n_past : every query before it is in the numbers.
        """
        self._pos, self._numbers = pos.copy(), np.array(numbers, np.float32)
        self.n_seen = n_past


def _held(pos: NDArray[np.int32], cells: NDArray[np.intp], n_seen: int) -> NDArray[np.intp]:
    """The cells, counted through all heads, that hold an entry at a position before n_seen."""
    of_cells = pos.reshape(-1)[cells]
    return cells[(of_cells >= 0) & (of_cells < n_seen)]


def _ids(pos: NDArray[np.int32], cells: NDArray[np.intp]) -> NDArray[np.int64]:
    """One number per layer, head and position, of cells counted through all heads."""
    ids: NDArray[np.int64] = (cells // pos.shape[-1]) * N_POSITIONS + pos.reshape(-1)[cells]
    return ids
