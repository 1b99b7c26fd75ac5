"""What the newest tokens attend to, and what lies beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.policies.knobs import settle
from h2o_gguf.policies.observed import (
    Pooling,
    by_layer,
    check_pooling,
    first_observed,
    mean_attention,
    over_neighbours,
    spare_observed,
)
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.view import CacheView

__all__ = ["SnapKV"]


@dataclass(frozen=True)
class SnapKV:
    """Keep the newest tokens and what their queries attend to, with its neighbours.

    The mean attention of the last n_observed queries is pooled over neighbouring entries, and averaged over
    the query heads. The paper does so once, at the end of the prompt; here it is done when room is needed.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries; n_recent -1 is n_observed, at
        most half of the rest. n_observed : queries, >= 1; their tokens go last.
    kernel : entries pooled, odd. pooling : "max" or "avg".

    Source: arXiv 2404.14469.
    """

    budget: int
    n_sink: int = 0
    n_recent: int = AUTO
    granularity: Granularity = "head"
    n_observed: int = 32
    kernel: int = 7
    pooling: Pooling = "max"

    name: ClassVar[str] = "snapkv"
    keeps: ClassVar[str] = "the newest and those they attend to"
    needs_scores: ClassVar[bool] = False
    n_trace: ClassVar[int] = 0
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self, self.n_observed)
        check_pooling(self.kernel, self.pooling)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n with the least pooled attention per KV head: int32[n_layer, n_head_kv, n]."""
        end = first_observed(view)

        def score(row: int) -> NDArray[np.floating[Any]]:
            attention = mean_attention(view, row)
            pooled = over_neighbours(attention, view.pos[row], end, self.kernel, self.pooling)
            return np.asarray(pooled.mean(1))

        scores = spare_observed(view, by_layer(view, score))
        return select_lowest(view, scores, view.evictable(self.n_sink, self.n_recent), n, self.granularity)
