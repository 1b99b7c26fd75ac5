"""What is attended to and not said twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.policies.knobs import check_number, settle
from h2o_gguf.policies.observed import (
    by_layer,
    check_pooling,
    first_observed,
    mean_attention,
    over_neighbours,
    spare_observed,
)
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.rows import directions
from h2o_gguf.view import CacheView

__all__ = ["RKV"]


@dataclass(frozen=True)
class RKV:
    """Keep entries that are attended to and whose keys are unlike the others'; for long chains of thought.

    The score is balance * attention of the newest queries, pooled over neighbours, minus (1 - balance) *
    redundancy, the softmax of the mean cosine with the other keys. Cosines up to `similar` do not count, nor
    does the newest entry similar to each: of a group of equals, that one stays. Time and memory grow with the
    square of the entries; the paper evicts every 128 generated tokens (kv_block=128).

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries; n_recent -1 is n_observed, at
        most half of the rest. n_observed : queries, >= 1; their tokens go last.
    kernel : entries pooled, odd. similar : cosine, -1 to 1. balance : 0 to 1.

    Source: arXiv 2505.24133.
    """

    budget: int
    n_sink: int = 0
    n_recent: int = AUTO
    granularity: Granularity = "head"
    n_observed: int = 8
    kernel: int = 7
    similar: float = 0.5
    balance: float = 0.1

    name: ClassVar[str] = "r-kv"
    keeps: ClassVar[str] = "those attended to that say something of their own"
    needs_scores: ClassVar[bool] = False
    n_trace: ClassVar[int] = 0
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self, self.n_observed)
        check_pooling(self.kernel)
        check_number("similar", self.similar, -1.0, 1.0)
        check_number("balance", self.balance, 0.0, 1.0)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n least attended to and most redundant per KV head: int32[n_layer, n_head_kv, n]."""
        end = first_observed(view)

        def score(row: int) -> NDArray[np.floating[Any]]:
            pos = view.pos[row]
            attention = over_neighbours(mean_attention(view, row), pos, end, self.kernel, "max").mean(1)
            redundancy = redundancies(view.seen.keys(row), pos, self.similar)
            balanced: NDArray[np.floating[Any]] = self.balance * attention - (1 - self.balance) * redundancy
            return balanced

        scores = spare_observed(view, by_layer(view, score))
        return select_lowest(view, scores, view.evictable(self.n_sink, self.n_recent), n, self.granularity)


def redundancies(
    keys: NDArray[np.floating[Any]], pos: NDArray[np.int32], similar: float
) -> NDArray[np.floating[Any]]:
    """Return how much each entry repeats others, as shares of 1: [n_head_kv, n_cells], 0 in empty cells.

    keys : [n_head_kv, n_cells, head_dim]. pos : int32[n_head_kv, n_cells].
    """
    held = pos >= 0
    order = np.argsort(-pos, axis=-1)  # newest first, so that the first similar one is the newest
    units = directions(np.take_along_axis(keys, order[..., None], 1), np.take_along_axis(held, order, -1))
    cosines = units @ units.swapaxes(1, 2)
    n_cells = pos.shape[-1]
    cosines[:, np.arange(n_cells), np.arange(n_cells)] = -1
    is_similar = cosines > similar
    newest = is_similar.argmax(-1)[..., None]
    np.put_along_axis(is_similar, newest, False, -1)
    n_held = np.maximum(held.sum(-1, keepdims=True), 1)
    means = np.empty_like(cosines[:, 0])
    np.put_along_axis(means, order, (cosines * is_similar).sum(1) / n_held, -1)
    mass = np.where(held, np.exp(means - means.max(-1, keepdims=True)), 0)
    shares: NDArray[np.floating[Any]] = mass / np.maximum(mass.sum(-1, keepdims=True), 1e-30)
    return shares
