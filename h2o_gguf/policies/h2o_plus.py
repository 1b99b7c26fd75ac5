"""Heavy hitters by rate beside entries that stand out, the default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import OptionError
from h2o_gguf.policies.base import settle
from h2o_gguf.policies.keydiff import directions
from h2o_gguf.policies.observed import traces_of
from h2o_gguf.policies.selection import POOLED_AXES, Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.view import CacheView

__all__ = ["H2OPlus"]

N_SAMPLE = 128  # newest entries whose keys tell what is common
KERNEL = 5


@dataclass(frozen=True)
class H2OPlus:
    """Keep the sinks, the recent window, heavy hitters, and entries that stand out from their neighbourhood.

    Heavy hitters have the most attention per query that saw them. An entry stands out by the length of its
    value times the distance of its key from what is common, as it was when it came: |v| (1 - cos(k, mean k)),
    averaged over 5 neighbouring tokens. Attention tells what the text itself comes back to; what stands out
    is what a question may come back to later: names, numbers, instructions.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries; n_recent -1 is half of the rest.
    standout : share of what they leave that goes to entries that stand out, 0 to 1; 0: heavy hitters alone.
    decay : factor by which attention fades per token, 0 to 1.

    Source: ours. The plain sum of h2o favours old entries, since more queries have seen them, and starves
    newcomers; the mean does neither, and its decay lets go of what is no longer used. Distance of keys as in
    keydiff (arXiv 2504.15364), length of values as in expected attention (arXiv 2510.00636).
    """

    budget: int
    n_sink: int = 4
    n_recent: int = AUTO
    granularity: Granularity = "head"
    decay: float = 0.9995
    standout: float = 0.5

    name: ClassVar[str] = "h2o+"
    keeps: ClassVar[str] = "those with the most attention per query, and those that stand out"
    needs_scores: ClassVar[bool] = True
    n_observed: ClassVar[int] = 0

    def __post_init__(self) -> None:
        settle(self)
        is_number = isinstance(self.standout, int | float | np.number) and not isinstance(self.standout, bool)
        if not is_number or not 0 <= self.standout <= 1:
            raise OptionError(f"standout is {self.standout!r}: it must be a share from 0 to 1", "standout")

    @property
    def n_trace(self) -> int:
        """How much each entry stands out, where that counts."""
        return int(self.standout > 0)

    def observe(self, view: CacheView) -> NDArray[np.float32]:
        """Return the traces with what is new measured: float32[1, n_layer, n_head_kv, n_cells]."""
        traces = traces_of(view, 1)
        first = view.pos[0, 0]
        n_new = int(np.count_nonzero(first >= view.n_past - view.n_unobserved))
        if n_new == 0:
            return traces
        n_sample = max(n_new, min(N_SAMPLE, view.n_used))
        shared = _newest(first, n_sample)
        for row in range(view.shape[0]):
            pos = view.pos[row]
            if (pos[:, shared] == first[shared]).all():  # as they came: the same cells in every head
                cells = np.broadcast_to(shared, (view.shape[1], n_sample))
                keys, values = view.seen.keys(row, shared), view.seen.values(row, shared[-n_new:])
            else:
                cells = _newest(pos, n_sample)
                keys = np.take_along_axis(view.seen.keys(row), cells[..., None], 1)
                values = np.take_along_axis(view.seen.values(row), cells[:, -n_new:, None], 1)
            keys = directions(keys)
            common = directions(keys.mean(1, keepdims=True))
            distance = 1 - (keys[:, -n_new:] * common).sum(-1)
            standing = _smoothed(np.linalg.norm(values, axis=-1) * distance)
            np.put_along_axis(traces[0, row], cells[:, -n_new:], standing.astype(np.float32), -1)
        return traces

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return n victims per KV head: int32[n_layer, n_head_kv, n].

        Heavy hitters are found first; of the others, those go that stand out least.
        """
        evictable = view.evictable(self.n_sink, self.n_recent)
        rates: NDArray[np.floating[Any]] = np.divide(view.scores, view.queries_seen())
        if view.traces is None:
            return select_lowest(view, rates, evictable, n, self.granularity)
        scores = view.traces[0].copy()
        n_kept = int(np.count_nonzero(evictable, axis=-1).min()) - n
        n_heavy = round((1 - self.standout) * n_kept)
        if axes := POOLED_AXES[self.granularity]:
            rates = np.broadcast_to(rates.sum(axes, keepdims=True), rates.shape)
        if n_heavy > 0:
            scores[_highest(rates, evictable, n_heavy)] = np.inf
        return select_lowest(view, scores, evictable, n, self.granularity)


def _newest(pos: NDArray[np.int32], n: int) -> NDArray[np.intp]:
    """Return the cells of the n entries with the highest positions, lowest first: [..., n]."""
    return np.argsort(pos, axis=-1)[..., -n:]


def _smoothed(scores: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Return the mean of each number and its neighbours, of those there are: [..., n]."""
    half = KERNEL // 2
    sums = np.cumsum(np.pad(scores, ((0, 0), (1, 0))), axis=-1, dtype=np.float64)
    at = np.arange(scores.shape[-1])
    start, end = np.maximum(at - half, 0), np.minimum(at + half + 1, scores.shape[-1])
    mean: NDArray[np.floating[Any]] = (sums[..., end] - sums[..., start]) / (end - start)
    return mean


def _highest(rates: NDArray[np.floating[Any]], evictable: NDArray[np.bool_], n: int) -> NDArray[np.bool_]:
    """Return which entries are among the n highest evictable ones of their head: bool[..., n_cells]."""
    masked = np.where(evictable, rates, np.float32(-np.inf))
    limit = np.partition(masked, -n, axis=-1)[..., -n, None]
    found: NDArray[np.bool_] = evictable & (masked >= limit)
    return found
