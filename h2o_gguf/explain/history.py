"""When each entry of a sequence was in the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.attic import Asking
from h2o_gguf.eviction import Span

__all__ = ["HELD", "History", "Recall", "no_gaps"]

HELD = int(np.iinfo(np.int32).max)


def no_gaps() -> NDArray[np.int32]:
    """Nothing ever came back: int32[0, 5]."""
    return np.empty((0, 5), np.int32)


@dataclass(frozen=True, eq=False)
class Recall:
    """A batch whose tokens fetched entries back.

    start, end : its positions. pins : spans that could not be exchanged. asking : how it recalled. n_total :
    entries of all heads recalled since the sequence was cleared, these included. gaps : as in History, of
    what came back. exchanged : int32[n, 3], what left in their place: row, KV head, position.
    """

    start: int
    end: int
    pins: tuple[Span, ...]
    asking: Asking
    n_total: int
    gaps: NDArray[np.int32]
    exchanged: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class History:
    """Times are how many tokens had been read.

    left : int32[n_layer, n_head_kv, n_past], when each entry left for good; HELD where it is still here.
    gaps : int32[n, 5], when it was away before that: row, KV head, position, when it left, when it came back.
    recalls : what brought them back, in order.
    """

    left: NDArray[np.int32]
    gaps: NDArray[np.int32] = field(default_factory=no_gaps)
    recalls: tuple[Recall, ...] = ()

    def gone(self, n_read: int) -> NDArray[np.bool_]:
        """Which entries were evicted and not back after n_read tokens: bool[n_layer, n_head_kv, n_past]."""
        gone: NDArray[np.bool_] = self.left <= n_read
        gone[self._of((self.gaps[:, 3] <= n_read) & (n_read < self.gaps[:, 4]))] = True
        return gone

    def held(self, n_read: int) -> NDArray[np.bool_]:
        """Which entries the cache held after n_read tokens, of the same shape."""
        held = ~self.gone(n_read)
        held[..., n_read:] = False
        return held

    def recalled(self, n_read: int) -> NDArray[np.bool_]:
        """Which of them had been evicted before."""
        recalled = np.zeros(self.left.shape, np.bool_)
        recalled[self._of(self.gaps[:, 4] <= n_read)] = True
        return recalled & self.held(n_read)

    def leaves(self, n_read: int) -> NDArray[np.int64]:
        """In which order the entries held after n_read tokens leave next, in the shape of left.

        Twice the time, and one more for what leaves in exchange: recalls come after evictions.
        """
        when = 2 * self.left.astype(np.int64)
        gone, back = self.gaps[:, 3], self.gaps[:, 4]
        ahead = self.gaps[(back > n_read) | ((back == n_read) & (gone == n_read))]
        for row, head, pos, left, _ in ahead[np.argsort(-ahead[:, 4], kind="stable")]:  # the next one counts
            when[row, head, pos] = 2 * left
        for recall in self.recalls:
            place = tuple(recall.exchanged.T)
            when[place] += when[place] == 2 * recall.start
        return when

    def evictions(self) -> dict[int, int]:
        """How many entries left each head, beyond those that others came back for, at each time."""
        is_first = (self.gaps[:, 0] == 0) & (self.gaps[:, 1] == 0)  # it is the same in all of them
        left, gaps = self.left[0, 0], self.gaps[is_first]
        times, counts = np.unique(np.concatenate([left[left != HELD], gaps[:, 3]]), return_counts=True)
        n = dict(zip(times.tolist(), counts.tolist(), strict=True))
        for back in gaps[:, 4].tolist():
            n[back] -= 1
        return {time: count for time, count in n.items() if count > 0}

    def _of(self, chosen: NDArray[np.bool_]) -> tuple[NDArray[np.int32], ...]:
        """Indices of gaps' entries."""
        return tuple(self.gaps[chosen, :3].T)
