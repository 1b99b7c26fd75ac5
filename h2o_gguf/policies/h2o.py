"""The paper's heavy hitters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from h2o_gguf.policies.knobs import settle
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.view import CacheView

__all__ = ["H2O"]


@dataclass(frozen=True)
class H2O:
    """Keep the recent window and the entries with the most attention.  Source: arXiv 2306.14048.

    budget : entries per KV head, >= 1. n_recent : protected entries; -1 is half, the paper's setting.
    n_sink : protected first positions; the paper protects none.
    """

    budget: int
    n_sink: int = 0
    n_recent: int = AUTO
    granularity: Granularity = "head"

    name: ClassVar[str] = "h2o"
    keeps: ClassVar[str] = "the most useful"
    needs_scores: ClassVar[bool] = True
    n_observed: ClassVar[int] = 0
    n_trace: ClassVar[int] = 0
    decay: ClassVar[float] = 1.0  # the plain sum

    def __post_init__(self) -> None:
        settle(self)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n with the least attention per KV head: int32[n_layer, n_head_kv, n]."""
        return select_lowest(
            view, view.scores, view.evictable(self.n_sink, self.n_recent), n, self.granularity
        )
