"""The keys that differ most from the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.policies.knobs import settle
from h2o_gguf.policies.observed import by_layer
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.view import CacheView

__all__ = ["KeyDiff"]


@dataclass(frozen=True)
class KeyDiff:
    """Keep the entries whose keys point away from the mean direction of a head's keys.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries, none in the paper.

    Source: arXiv 2504.15364.
    """

    budget: int
    n_sink: int = 0
    n_recent: int = 0
    granularity: Granularity = "head"

    name: ClassVar[str] = "keydiff"
    keeps: ClassVar[str] = "those whose keys differ most"
    needs_scores: ClassVar[bool] = False
    n_observed: ClassVar[int] = 0
    n_trace: ClassVar[int] = 0
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n with the most common keys per KV head: int32[n_layer, n_head_kv, n]."""

        def score(row: int) -> NDArray[np.float32]:
            held = view.pos[row, ..., None] >= 0
            keys = np.where(held, view.seen.keys(row), np.float32(0))
            return view.rows.distances(keys, keys.shape[1])

        scores = by_layer(view, score)
        return select_lowest(view, scores, view.evictable(self.n_sink, self.n_recent), n, self.granularity)
