"""The smallest keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from h2o_gguf.policies.knobs import settle
from h2o_gguf.policies.observed import by_layer
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.view import CacheView

__all__ = ["KNorm"]


@dataclass(frozen=True)
class KNorm:
    """Keep the entries with the smallest keys, which tend to get the most attention.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries, none in the paper.

    Source: arXiv 2406.11430.
    """

    budget: int
    n_sink: int = 0
    n_recent: int = 0
    granularity: Granularity = "head"

    name: ClassVar[str] = "knorm"
    keeps: ClassVar[str] = "those with the smallest keys"
    needs_scores: ClassVar[bool] = False
    n_observed: ClassVar[int] = 0
    n_trace: ClassVar[int] = 0
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n with the largest keys per KV head: int32[n_layer, n_head_kv, n]."""
        scores = by_layer(view, lambda row: -np.linalg.norm(view.seen.keys(row), axis=-1))
        return select_lowest(view, scores, view.evictable(self.n_sink, self.n_recent), n, self.granularity)
