"""What policies that look at queries, keys or values have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import OptionError
from h2o_gguf.view import CacheView

__all__ = [
    "Pooling",
    "by_layer",
    "check_pooling",
    "first_observed",
    "mean_attention",
    "new_queries",
    "over_neighbours",
    "spare_observed",
    "traces_of",
]

Pooling = Literal["max", "avg"]
Floats = NDArray[np.floating[Any]]


def by_layer(view: CacheView, score: Callable[[int], Floats]) -> NDArray[np.float32]:
    """Return the scores of all layers, asked for one at a time: float32[n_layer, n_head_kv, n_cells].

    score : row -> [n_head_kv, n_cells].
    """
    scores = np.empty(view.shape, np.float32)
    for row in range(view.shape[0]):
        scores[row] = score(row)
    return scores


def mean_attention(view: CacheView, row: int) -> Floats:
    """Return the mean attention of the recorded queries, 0 without any: [n_head_kv, n_group, n_cells]."""
    n_query = np.count_nonzero(view.seen.query_pos >= 0)
    mean: Floats = view.attention(row).sum(2) / max(1, n_query)
    return mean


def spare_observed(view: CacheView, scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scores in which the tokens of the recorded queries go last: few queries could judge them."""
    return np.where(view.pos >= first_observed(view), np.float32(np.inf), scores)


def first_observed(view: CacheView) -> int:
    """Position of the oldest recorded query; n_past without any."""
    query_pos = view.seen.query_pos
    return int(query_pos[query_pos >= 0].min(initial=view.n_past))


def over_neighbours(scores: Floats, pos: NDArray[np.int32], end: int, kernel: int, how: Pooling) -> Floats:
    """Return scores pooled over each entry and the entries next to it, in order of position.

    The neighbours are the kernel // 2 entries held before and after it. Before the first and from position
    `end` on there are none, which is nothing for a maximum, and 0 for a mean over `kernel`.

    Returns: [n_head_kv, n_group, n_cells], 0 for entries from `end` on and in empty cells.
    scores : [n_head_kv, n_group, n_cells]. pos : int32[n_head_kv, n_cells].
    """
    is_in = (pos >= 0) & (pos < end)
    order = np.argsort(np.where(is_in, pos, np.iinfo(np.int32).max), axis=-1)[:, None, :]
    nothing = -np.inf if how == "max" else 0.0
    in_order = np.take_along_axis(np.where(is_in[:, None, :], scores, nothing), order, -1)
    half = kernel // 2
    padded = np.pad(in_order, ((0, 0), (0, 0), (half, half)), constant_values=nothing)
    windows = [padded[..., i : i + scores.shape[-1]] for i in range(kernel)]
    pooled = np.maximum.reduce(windows) if how == "max" else np.add.reduce(windows) / kernel
    out = np.empty_like(pooled)
    np.put_along_axis(out, order, pooled, -1)
    return np.where(is_in[:, None, :], out, 0)


def check_pooling(kernel: Any, pooling: Any = "max") -> None:
    """Raises: OptionError, kernel is no odd number of 1 or more, or pooling neither "max" nor "avg"."""
    if isinstance(kernel, bool) or not isinstance(kernel, int | np.integer) or kernel < 1 or kernel % 2 == 0:
        raise OptionError(
            f"kernel is {kernel!r}: it must be an odd number, so that both sides have as many neighbours",
            "kernel",
        )
    if pooling not in ("max", "avg"):
        raise OptionError(f"pooling is {pooling!r}: it must be 'max' or 'avg'", "pooling")


def new_queries(view: CacheView) -> NDArray[np.bool_]:
    """Which recorded queries observe() has not seen: bool[n_observed]."""
    return view.seen.query_pos >= max(0, view.n_past - view.n_unobserved)


def traces_of(view: CacheView, n_trace: int) -> NDArray[np.float32]:
    """Return a copy of the view's traces, 0 if it has none: float32[n_trace, n_layer, n_head_kv, n_cells]."""
    return np.zeros((n_trace, *view.shape), np.float32) if view.traces is None else view.traces.copy()
