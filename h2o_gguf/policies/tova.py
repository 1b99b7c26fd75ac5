"""What the last token attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from h2o_gguf.policies.knobs import settle
from h2o_gguf.policies.observed import by_layer, mean_attention
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.view import CacheView

__all__ = ["TOVA"]


@dataclass(frozen=True)
class TOVA:
    """Keep what the last query attends to, on the mean of a layer's heads.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries; n_recent -1 is the last token.
    granularity : "layer" is the paper's, one list for the heads of a layer.

    Source: arXiv 2401.06104.
    """

    budget: int
    n_sink: int = 0
    n_recent: int = AUTO
    granularity: Granularity = "layer"

    name: ClassVar[str] = "tova"
    keeps: ClassVar[str] = "those the last token attends to"
    needs_scores: ClassVar[bool] = False
    n_observed: ClassVar[int] = 1
    n_trace: ClassVar[int] = 0
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self, n_recent_most=1)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n the last query attends to least: int32[n_layer, n_head_kv, n]."""
        scores = by_layer(view, lambda row: mean_attention(view, row).mean(1))
        return select_lowest(view, scores, view.evictable(self.n_sink, self.n_recent), n, self.granularity)
