"""What often gets more than its share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.policies.knobs import check_whole, settle
from h2o_gguf.policies.observed import new_queries, traces_of
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.view import CacheView

__all__ = ["Scissorhands"]


@dataclass(frozen=True)
class Scissorhands:
    """Keep the recent window and the entries that were pivotal most often.

    An entry is pivotal for a query that gives it more than 1 / t, t being the entries the query sees: more
    than the average. The count over a head's queries fades by 1 - 1 / window a token, so that about the last
    `window` tokens count; the paper's window has an edge. Of a longer batch, the last n_observed queries
    count.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries; n_recent -1 is half of the rest.
    n_observed : queries, >= 1. window : tokens, >= 1; 400 in the paper.

    Source: arXiv 2305.17118.
    """

    budget: int
    n_sink: int = 0
    n_recent: int = AUTO
    granularity: Granularity = "head"
    n_observed: int = 32
    window: int = 400

    name: ClassVar[str] = "scissorhands"
    keeps: ClassVar[str] = "the newest and those most often attended to"
    needs_scores: ClassVar[bool] = False
    n_trace: ClassVar[int] = 1  # the faded count
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self)
        check_whole("window", self.window, 1)

    def observe(self, view: CacheView) -> NDArray[np.float32]:
        """Return the counts after the queries not observed yet: float32[1, n_layer, n_head_kv, n_cells]."""
        fading = 1 - 1 / self.window
        traces = traces_of(view, self.n_trace)
        traces *= fading**view.n_unobserved
        new = new_queries(view)
        query_pos = view.seen.query_pos[new]
        weight = (fading ** (view.n_past - 1 - query_pos))[:, None]
        for row in range(view.shape[0]):
            attention = view.attention(row)[:, :, new]
            pos = view.pos[row, :, None, :]
            n_seen = ((pos >= 0) & (pos <= query_pos[:, None])).sum(-1)[:, None, :, None]
            traces[0, row] += ((attention * n_seen > 1) * weight).sum((1, 2))
        return traces

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n least often pivotal per KV head: int32[n_layer, n_head_kv, n]."""
        counts = traces_of(view, self.n_trace)[0]
        return select_lowest(view, counts, view.evictable(self.n_sink, self.n_recent), n, self.granularity)
