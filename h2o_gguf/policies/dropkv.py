"""What the output cannot do without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.policies.knobs import settle
from h2o_gguf.policies.observed import by_layer, spare_observed
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.view import CacheView

__all__ = ["DropKV"]


@dataclass(frozen=True)
class DropKV:
    """Keep the entries without which the attention output of the newest queries would change most.

    Without entry i the output o = sum p v of a query moves by p / (1 - p) * |v_i - o|, once the others share
    its attention. The score is the square of that, summed over the last n_observed queries and their heads:
    all layers and heads have it in one unit.

    budget : entries per KV head, >= 1. n_sink, n_recent : protected entries; n_recent -1 is n_observed, at
        most half of the rest. n_observed : queries, >= 1; their tokens go last.

    Source: ours; the error is exact for one entry dropped.
    """

    budget: int
    n_sink: int = 4
    n_recent: int = AUTO
    granularity: Granularity = "head"
    n_observed: int = 32

    name: ClassVar[str] = "dropkv"
    keeps: ClassVar[str] = "those whose loss would change most"
    needs_scores: ClassVar[bool] = False
    n_trace: ClassVar[int] = 0
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self, self.n_observed)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n whose loss changes the output least per KV head: int32[n_layer, n_head_kv, n]."""
        scores = spare_observed(view, by_layer(view, lambda row: output_errors(view, row)))
        return select_lowest(view, scores, view.evictable(self.n_sink, self.n_recent), n, self.granularity)


def output_errors(view: CacheView, row: int) -> NDArray[np.floating[Any]]:
    """Return the squared error of dropping each entry, summed over queries: [n_head_kv, n_cells]."""
    values = np.where(view.pos[row, :, :, None] >= 0, view.seen.values(row), 0)
    n_head_kv, n_cells, _ = values.shape
    attention = view.attention(row).reshape(n_head_kv, -1, n_cells)
    # The strongest entry of a query apart: where p is close to 1, o is close to v and v - o is noise.
    best = attention.argmax(-1)[..., None]
    p_best, v_best = np.take_along_axis(attention, best, -1), np.take_along_axis(values, best, 1)
    np.put_along_axis(attention, best, 0, -1)
    others = attention @ values
    rest = np.maximum(1 - p_best, attention.sum(-1, keepdims=True))
    without_best = others / np.maximum(rest, np.finfo(rest.dtype).tiny)
    error_best = np.square(p_best * (v_best - without_best)).sum(-1)
    # |v - o|^2 = |v|^2 - 2 v o + |o|^2, weighted and summed over the queries.
    outputs = others + p_best * v_best
    share = np.square(attention / (1 - attention)).swapaxes(1, 2)
    errors: NDArray[np.floating[Any]] = share.sum(-1) * np.square(values).sum(-1)
    errors -= 2 * (values * (share @ outputs)).sum(-1)
    errors += (share @ np.square(outputs).sum(-1, keepdims=True))[..., 0]
    errors = np.maximum(errors, 0)
    np.add.at(errors, (np.arange(n_head_kv)[:, None], best[..., 0]), error_best)
    return errors
