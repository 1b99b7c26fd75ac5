"""Keep the sinks and the newest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from h2o_gguf.policies.knobs import settle
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.view import CacheView

__all__ = ["Streaming"]


@dataclass(frozen=True)
class Streaming:
    """Keep the first n_sink and the last budget - n_sink entries.  Source: arXiv 2309.17453.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries; n_recent -1 is half of the rest.
        The oldest goes first, so what is kept is recent whatever n_recent says: it only bounds what pinned
        spans may push out.
    """

    budget: int
    n_sink: int = 4
    n_recent: int = AUTO
    granularity: Granularity = "head"

    name: ClassVar[str] = "streaming"
    keeps: ClassVar[str] = "the first and the newest"
    needs_scores: ClassVar[bool] = False
    n_observed: ClassVar[int] = 0
    n_trace: ClassVar[int] = 0
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n oldest per KV head: int32[n_layer, n_head_kv, n]."""
        return select_lowest(view, view.pos, view.evictable(self.n_sink, self.n_recent), n, self.granularity)
