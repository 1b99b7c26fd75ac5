"""Numbers a policy keeps for every entry, carried along as entries move, leave and arrive."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.rows import PLAIN, Rows
from h2o_gguf.saved_traces import SavedTraces

__all__ = ["Traces"]

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

    def at(self, pos: NDArray[np.int32], rows: Rows = PLAIN) -> NDArray[np.float32]:
        """Return the numbers of the entries that cells hold now, 0 for new ones and in empty cells.

        rows : who looks them up. pos : int32[n_layer, n_head_kv, n_cells], -1 empty.
        Returns: float32[n_trace, *pos.shape].
        """
        if self._pos is None or self._pos.shape[:2] != pos.shape[:2]:
            return np.zeros((self.n_trace, *pos.shape), np.float32)
        return rows.carried(self._numbers, self._pos, pos)

    def save(self, layers: tuple[int, ...]) -> SavedTraces | None:
        """All that is known, also of entries that left since and may be recalled; None before the first put.

        layers : theirs.
        """
        if self._pos is None:
            return None
        is_used = (self._pos >= 0).any((0, 1))
        pos = np.maximum(self._pos[..., is_used], -1)
        return SavedTraces(layers, self.n_seen, pos, self._numbers[..., is_used])

    def put(self, pos: NDArray[np.int32], numbers: NDArray[np.float32], n_past: int) -> None:
        """Keep the numbers of the entries that cells hold now, and of no others.

        pos, numbers : kept as they are, so that nobody may change them any more.
        n_past : every query before it is in the numbers.
        """
        self._pos, self._numbers, self.n_seen = pos, numbers, n_past
