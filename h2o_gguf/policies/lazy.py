"""What comes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.policies.knobs import check_number, settle
from h2o_gguf.policies.observed import new_queries, traces_of
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.view import CacheView

__all__ = ["Lazy"]

STEEPEST = 80.0  # float32 has no exp of much more


@dataclass(frozen=True)
class Lazy:
    """Keep entries for as long as they may come back into use; for long chains of thought.

    An entry is in use at a query of which any head gives it more than `active`. With TS the position of the
    last such query, MRI the longest gap between two of them (the first is the entry itself) and t now, the
    score is 2 sigmoid(-(t - TS) / MRI) + 2 sigmoid(-MRI - 1). Of a longer batch the last n_observed queries
    count, and the others make no gap longer: nobody knows what they used.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries; n_recent -1 is half of the rest.
    n_observed : queries, >= 1. active : attention, 0 to 1.

    Source: arXiv 2506.15969.
    """

    budget: int
    n_sink: int = 0
    n_recent: int = AUTO
    granularity: Granularity = "head"
    n_observed: int = 32
    active: float = 1e-4

    name: ClassVar[str] = "lazy"
    keeps: ClassVar[str] = "the newest and those that come back into use"
    needs_scores: ClassVar[bool] = False
    n_trace: ClassVar[int] = 2  # TS - the entry's position, and MRI
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self)
        check_number("active", self.active, 0.0, 1.0)

    def observe(self, view: CacheView) -> NDArray[np.float32]:
        """Return last use and longest gap after the new queries: float32[2, n_layer, n_head_kv, n_cells]."""
        traces = traces_of(view, self.n_trace)
        new = new_queries(view)
        query_pos = view.seen.query_pos[new]
        if not len(query_pos):
            return traces
        traces[0] += _unseen(view, view.pos + traces[0], int(query_pos[0]))
        for row in range(view.shape[0]):
            in_use = view.attention(row)[:, :, new].max(1) > self.active
            step = query_pos[:, None] - view.pos[row, :, None, :]
            last, gap = traces[:, row]
            # last use before each query and after the newest: [n_head_kv, n_query + 1, n_cells]
            uses = np.concatenate([last[:, None], np.where(in_use, step, 0)], 1)
            uses = np.maximum.accumulate(uses, 1)
            gaps = np.where(in_use, step - uses[:, :-1], 0)
            traces[0, row], traces[1, row] = uses[:, -1], np.maximum(gap, gaps.max(1))
        return traces

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n whose return is least likely per KV head: int32[n_layer, n_head_kv, n]."""
        last, gap = traces_of(view, self.n_trace)
        idle = view.n_past - 1 - view.pos - last
        late = np.divide(idle, gap, out=np.where(idle > 0, np.float32(np.inf), 0), where=gap > 0)
        scores = 2 * _sigmoid(-late) + 2 * _sigmoid(-gap - 1)
        return select_lowest(view, scores, view.evictable(self.n_sink, self.n_recent), n, self.granularity)


def _unseen(view: CacheView, last: NDArray[np.floating[Any]], first: int) -> NDArray[np.floating[Any]]:
    """Return how many tokens after an entry's last use, before the first new query, were never observed.

    last : position of the last use, [n_layer, n_head_kv, n_cells].
    """
    unseen: NDArray[np.floating[Any]] = first - np.maximum(view.n_past - view.n_unobserved, last + 1)
    return np.where(view.pos >= 0, np.maximum(unseen, 0), 0)


def _sigmoid(x: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    return np.asarray(1 / (1 + np.exp(np.minimum(-x, STEEPEST))))
