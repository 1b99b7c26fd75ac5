"""Evict at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from h2o_gguf.errors import OptionError
from h2o_gguf.policies.knobs import settle
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.view import CacheView

__all__ = ["Random"]


@dataclass(frozen=True)
class Random:
    """Evict uniformly outside the protected set.  Source: ours, a control: who does not beat it is no policy.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries, none unless asked for: with
    them most of what a good policy does is done. n_recent -1 is half of what the sinks leave.
    seed : >= 0.
    """

    budget: int
    n_sink: int = 0
    n_recent: int = 0
    granularity: Granularity = "head"
    seed: int = 0

    name: ClassVar[str] = "random"
    keeps: ClassVar[str] = "drawn at random"
    needs_scores: ClassVar[bool] = False
    n_observed: ClassVar[int] = 0
    n_trace: ClassVar[int] = 0
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self)
        if not isinstance(self.seed, int | np.integer) or self.seed < 0:
            raise OptionError(f"seed is {self.seed!r}: it must be a whole number, 0 or more", "seed")

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return n victims per KV head: int32[n_layer, n_head_kv, n]."""
        # From what the view holds, not from a running generator: same view, same answer.
        draws = np.random.default_rng([self.seed, view.n_past]).random(view.shape, np.float32)
        return select_lowest(view, draws, view.evictable(self.n_sink, self.n_recent), n, self.granularity)
