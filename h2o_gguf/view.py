"""What a policy sees of a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["CacheView"]

FLOAT32_BITS = 24  # weights below 2^-24 no longer change a float32 sum


@dataclass(frozen=True, eq=False)
class CacheView:
    """The cache at the moment room is needed.  Read-only; valid only during the call it is passed to.

    scores : float32[n_layer, n_head_kv, n_cells], decayed sum of the attention mass each entry has
        received; 0 when the policy asked for none.
    pos : int32[n_layer, n_head_kv, n_cells], position of the entry in the sequence, -1 empty.
    n_past : next position; every query before it has been counted.
    n_used : entries per KV head.
    decay : factor per token the scores were summed with, in [0, 1]; 1.0 is the plain sum.
    layer_ids : the model's layer of each row.
    pins : half-open spans of positions that are never victims.
    """

    scores: NDArray[np.float32]
    pos: NDArray[np.int32]
    n_past: int
    n_used: int
    decay: float = 1.0
    layer_ids: tuple[int, ...] = ()
    pins: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.pos.ndim != 3 or self.scores.shape != self.pos.shape:
            raise ValueError(
                f"scores {self.scores.shape} and pos {self.pos.shape} "
                "must both be [n_layer, n_head_kv, n_cells]"
            )
        object.__setattr__(self, "scores", _read_only(self.scores, np.float32))
        object.__setattr__(self, "pos", _read_only(self.pos, np.int32))
        if not self.layer_ids:
            object.__setattr__(self, "layer_ids", tuple(range(self.pos.shape[0])))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n_layer, n_head_kv, n_cells)."""
        n_layer, n_head_kv, n_cells = self.pos.shape
        return n_layer, n_head_kv, n_cells

    def pinned(self) -> NDArray[np.bool_]:
        """Which entries lie in a pinned span: bool[n_layer, n_head_kv, n_cells]."""
        inside = np.zeros(self.pos.shape, np.bool_)
        for start, end in self.pins:
            inside |= (self.pos >= max(start, 0)) & (self.pos < end)
        return inside

    def evictable(self, n_sink: int, n_recent: int) -> NDArray[np.bool_]:
        """Which entries may be victims: bool[n_layer, n_head_kv, n_cells].

        Everything but the empty cells, positions below n_sink, the newest n_recent positions and the
        pinned spans.
        """
        free = self.pos >= max(int(n_sink), 0)
        free &= self.pos < self.n_past - max(int(n_recent), 0)  # a small integer of numpy's would overflow
        if self.pins:
            free &= ~self.pinned()
        return free

    def queries_seen(self) -> NDArray[np.float32]:
        """How many queries could see each entry, faded like scores: float32[n_layer, n_head_kv, n_cells].

        An entry at position p was seen by the queries at p, ..., n_past - 1, the newest with weight 1:
        1 + decay + ... + decay^(age - 1) = (1 - decay^age) / (1 - decay) with age = n_past - p.
        At least 1, also in empty cells. A query counts once, however many query heads share the KV head.
        """
        age = self.n_past - self.pos
        np.maximum(age, 1, out=age)
        if self.decay == 1.0:
            return age.astype(np.float32)
        if self.decay == 0.0:
            return np.ones(age.shape, np.float32)
        # Beyond some age the sum no longer grows in float32, so a short table serves every entry.
        log_decay = math.log(self.decay)
        n_ages = max(1, min(self.n_past, math.ceil(FLOAT32_BITS * math.log(2) / -log_decay)))
        sums = -np.expm1(np.arange(n_ages + 1) * log_decay) / (1.0 - self.decay)
        seen: NDArray[np.float32] = sums.astype(np.float32).take(age, mode="clip")
        return seen


def _read_only(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    view: NDArray[Any] = np.asarray(array, dtype).view()
    view.setflags(write=False)
    return view
