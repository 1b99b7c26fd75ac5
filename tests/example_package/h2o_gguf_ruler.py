"""An eviction policy for h2o-gguf: keep the older the more thinly, like the marks of a ruler."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_gguf.policies import Cells, select_lowest
from h2o_gguf.view import CacheView

__all__ = ["Ruler"]


@dataclass(frozen=True)
class Ruler:
    """Keep positions that a high power of two divides longer: position p counts 2^k / age, if 2^k divides p.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries.
    """

    budget: int
    n_sink: int = 4
    n_recent: int = 16
    needs_scores: bool = False

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return n victims per KV head: int32[n_layer, n_head_kv, n]."""
        scores = (view.pos & -view.pos) / (view.n_past - view.pos)
        return select_lowest(view, scores, view.evictable(self.n_sink, self.n_recent), n)
