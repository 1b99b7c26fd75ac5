"""Heavy hitters by rate, the default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from h2o_gguf.policies.base import settle
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.view import CacheView

__all__ = ["H2OPlus"]


@dataclass(frozen=True)
class H2OPlus:
    """Keep the sinks, the recent window and the entries with the most attention per query that saw them.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries; n_recent -1 is half of the rest.
    decay : factor by which attention fades per token, 0 to 1.

    Source: ours. The plain sum of h2o favours old entries, since more queries have seen them, and starves
    newcomers; the mean does neither, and its decay lets go of what is no longer used.
    """

    budget: int
    n_sink: int = 4
    n_recent: int = AUTO
    granularity: Granularity = "head"
    decay: float = 0.9995

    name: ClassVar[str] = "h2o+"
    keeps: ClassVar[str] = "the most useful"
    needs_scores: ClassVar[bool] = True
    n_observed: ClassVar[int] = 0
    n_trace: ClassVar[int] = 0

    def __post_init__(self) -> None:
        settle(self)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n with the lowest attention rate per KV head: int32[n_layer, n_head_kv, n]."""
        rates = view.queries_seen()
        np.divide(view.scores, rates, out=rates)  # in place: fresh memory costs more than the division
        return select_lowest(view, rates, view.evictable(self.n_sink, self.n_recent), n, self.granularity)
