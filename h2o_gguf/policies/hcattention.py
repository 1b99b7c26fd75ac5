"""What layers put their weight on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.policies.knobs import check_number, settle
from h2o_gguf.policies.observed import new_queries, traces_of
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.view import CacheView

__all__ = ["HCAttention"]


@dataclass(frozen=True)
class HCAttention:
    """Keep the recent window and the entries with the most cumulative weight in their layer.

    A query gives weight only to the smallest set of entries whose attention, the mean of the layer's heads,
    sums to tau. This is the paper's rule of permanent eviction; attending to that set alone is no policy's.
    Of a longer batch the last n_observed queries count.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries; n_recent -1 is half of the rest.
    granularity : "layer" is the paper's; with "head" each KV head has sets of its own.
    n_observed : queries, >= 1. tau : 0 to 1; 1 is every weight.

    Source: arXiv 2507.19823.
    """

    budget: int
    n_sink: int = 0
    n_recent: int = AUTO
    granularity: Granularity = "layer"
    n_observed: int = 32
    tau: float = 0.9

    name: ClassVar[str] = "hcattention"
    keeps: ClassVar[str] = "the newest and those with the most weight"
    needs_scores: ClassVar[bool] = False
    n_trace: ClassVar[int] = 1  # cumulative weight
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self)
        check_number("tau", self.tau, 0.0, 1.0)

    def observe(self, view: CacheView) -> NDArray[np.float32]:
        """Return the weights after the queries not observed yet: float32[1, n_layer, n_head_kv, n_cells]."""
        traces = traces_of(view, self.n_trace)
        new = new_queries(view)
        for row in range(view.shape[0]):
            weights = view.attention(row)[:, :, new].mean(1)
            if self.granularity != "head":
                weights = weights.mean(0, keepdims=True)
            falling = -np.sort(-weights, axis=-1)
            sums = np.cumsum(falling, -1)
            last = (sums >= self.tau * sums[..., -1:]).argmax(-1)[..., None]
            least = np.take_along_axis(falling, last, -1)
            traces[0, row] += np.where(weights >= least, weights, 0).sum(1)
        return traces

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n with the least cumulative weight: int32[n_layer, n_head_kv, n]."""
        weights = traces_of(view, self.n_trace)[0]
        return select_lowest(view, weights, view.evictable(self.n_sink, self.n_recent), n, self.granularity)
