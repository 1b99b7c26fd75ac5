"""Heavy hitters by rate beside entries that stand out, the default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import OptionError
from h2o_gguf.policies.knobs import settle
from h2o_gguf.policies.observed import traces_of
from h2o_gguf.policies.selection import Cells, Granularity, fewest, select_highest, select_lowest
from h2o_gguf.policies.shares import AUTO, QUARTER
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

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries; n_recent -1 is a quarter of
        what the sinks leave.
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
        settle(self, recent_part=QUARTER)
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
        as_they_came = view.pos.take(shared, axis=-1) == first[shared]
        is_shared = as_they_came.all((1, 2))
        cells = np.empty((*view.shape[:2], n_new), np.intp)
        standing = np.empty(cells.shape, np.float32)
        for row in range(view.shape[0]):
            if is_shared[row]:
                cells[row] = shared[-n_new:]
                keys, values = view.seen.keys(row, shared), view.seen.values(row, shared[-n_new:])
            else:
                sample = _newest(view.pos[row], n_sample)
                cells[row] = sample[:, -n_new:]
                keys = np.take_along_axis(view.seen.keys(row), sample[..., None], 1)
                values = np.take_along_axis(view.seen.values(row), cells[row, ..., None], 1)
            standing[row] = view.rows.lengths(values) * view.rows.distances(keys, n_new)
        np.put_along_axis(traces[0], cells, _smoothed(standing), -1)
        return traces

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return n victims per KV head: int32[n_layer, n_head_kv, n].

        Heavy hitters are found first; of the others, those go that stand out least.
        """
        evictable, rates = view.evictable(self.n_sink, self.n_recent), view.rates()
        if view.traces is None:
            return select_lowest(view, rates, evictable, n, self.granularity)
        n_kept = fewest(evictable) - n
        n_heavy = max(0, round((1 - self.standout) * n_kept))
        is_heavy = select_highest(view, rates, evictable, n_heavy, self.granularity)
        return select_lowest(view, view.traces[0], evictable & ~is_heavy, n, self.granularity)


def _newest(pos: NDArray[np.int32], n: int) -> NDArray[np.intp]:
    """Return the cells of the n entries with the highest positions, lowest first: [..., n]."""
    cells = np.argpartition(pos, -n, axis=-1)[..., -n:]
    order = np.argsort(np.take_along_axis(pos, cells, -1), axis=-1)
    return np.take_along_axis(cells, order, -1)


def _smoothed(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean of each number and its neighbours, of those there are: float32[..., n]."""
    n, half = numbers.shape[-1], KERNEL // 2
    sums = np.zeros((*numbers.shape[:-1], n + 1))
    np.cumsum(numbers, axis=-1, out=sums[..., 1:])
    at = np.arange(n)
    start, end = np.maximum(at - half, 0), np.minimum(at + half + 1, n)
    mean: NDArray[np.floating[Any]] = (sums[..., end] - sums[..., start]) / (end - start)
    return mean.astype(np.float32)
