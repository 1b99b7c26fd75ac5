"""Numbers a policy keeps for every entry, carried along as entries move, leave and arrive."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Traces"]

N_POSITIONS = 2**31  # positions are int32


class Traces:
    """n_trace numbers per entry, found again by layer, head and position, whatever cell it lies in.

    n_seen : queries before this position are in the numbers, or will never be.

    A saved session holds none: after it is loaded, traces start at 0.
    """

    def __init__(self, n_trace: int, n_seen: int = 0) -> None:
        self.n_trace = n_trace
        self.n_seen = n_seen
        self._ids = np.zeros(0, np.int64)  # ascending
        self._numbers = np.zeros((n_trace, 0), np.float32)

    def drop_from(self, n_past: int) -> None:
        """Forget the entries at positions >= n_past: they were rolled back, others may take their place."""
        stays = self._ids % N_POSITIONS < n_past
        self._ids, self._numbers = self._ids[stays], self._numbers[:, stays]
        self.n_seen = min(self.n_seen, n_past)

    def at(self, pos: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the numbers of the entries that cells hold now, 0 for new ones and in empty cells.

        pos : int32[n_layer, n_head_kv, n_cells], -1 empty.  Returns: float32[n_trace, *pos.shape].
        """
        found = np.zeros((self.n_trace, *pos.shape), np.float32)
        if self._ids.size:
            ids = _ids(pos)
            at = np.minimum(np.searchsorted(self._ids, ids), self._ids.size - 1)
            is_known = self._ids[at] == ids
            found[:, is_known] = self._numbers[:, at[is_known]]
        return found

    def put(self, pos: NDArray[np.int32], numbers: NDArray[np.floating[Any]], n_past: int) -> None:
        """Keep the numbers of the entries that cells hold now, and of no others.

        n_past : every query before it is in the numbers.
        """
        held = pos >= 0
        ids = _ids(pos)[held]
        order = np.argsort(ids)
        self._ids, self._numbers = ids[order], numbers[:, held][:, order].astype(np.float32)
        self.n_seen = n_past


def _ids(pos: NDArray[np.int32]) -> NDArray[np.int64]:
    """One number per layer, head and position; negative for none."""
    heads = np.arange(pos.shape[0] * pos.shape[1], dtype=np.int64).reshape(*pos.shape[:2], 1)
    return np.where(pos >= 0, heads * N_POSITIONS + pos, -1)
