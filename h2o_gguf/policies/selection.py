"""Choosing victims by score: one vectorised selection for every policy."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import BudgetError, OptionError, PolicyError
from h2o_gguf.view import CacheView

__all__ = ["Cells", "Granularity", "select_lowest"]

Cells: TypeAlias = NDArray[np.int32]  # [n_layer, n_head_kv, n], cell indices
Granularity = Literal["head", "layer", "token"]  # who shares one list of victims

POOLED_AXES: dict[str, tuple[int, ...]] = {"head": (), "layer": (1,), "token": (0, 1)}
GROUPS_PER_VICTIM = 4
ROWS_AT_ONCE = 64  # 1 MB of scores at 4,096 cells


def select_lowest(
    view: CacheView,
    scores: NDArray[Any],
    evictable: NDArray[np.bool_],
    n: int,
    granularity: Granularity = "head",
) -> Cells:
    """Return the n evictable cells with the lowest scores: int32[n_layer, n_head_kv, n], lowest first.

    Equal scores go oldest first. Scores are compared as float32; infinities are allowed.

    scores, evictable : [n_layer, n_head_kv, n_cells].
    n : victims per KV head, >= 0.
    granularity : "head", every KV head has its own victims; "layer", scores are summed over the KV heads
        and all heads of a layer lose the same cells; "token", summed over layers and heads.

    Raises: BudgetError, fewer than n entries of a head are evictable. PolicyError, a score is NaN, or
        heads that shall share victims hold different positions in a cell. OptionError, unknown granularity.
    Source: ours; the order of ties is what makes runs repeat.
    """
    check_granularity(granularity)
    pos = view.pos
    if axes := POOLED_AXES[granularity]:
        pos, scores, evictable = _pool(pos, scores, evictable, axes, granularity)
    n_evictable = int(evictable.view(np.uint8).sum(axis=-1, dtype=np.int32).min())
    if n_evictable < n:
        raise BudgetError(
            f"{n} entries must go from every KV head, but only {n_evictable} of {view.n_used} may: "
            "raise the budget (kv_budget), or protect less",
            n_protected=view.n_used - n_evictable,
        )
    rows = -1, pos.shape[-1]
    flat_scores, flat_pos, flat_evictable = scores.reshape(rows), pos.reshape(rows), evictable.reshape(rows)
    # Some rows at a time: what is computed on the way stays in the processor's cache.
    starts = range(0, len(flat_pos), ROWS_AT_ONCE)
    parts = [
        _lowest(flat_scores[some], flat_pos[some], flat_evictable[some], n)
        for some in (slice(start, start + ROWS_AT_ONCE) for start in starts)
    ]
    victims = np.concatenate(parts).reshape(*pos.shape[:2], n)
    return np.array(np.broadcast_to(victims, (*view.shape[:2], n)), np.int32)


def check_granularity(granularity: str) -> None:
    """Raise OptionError unless granularity is "head", "layer" or "token"."""
    if granularity not in get_args(Granularity):
        raise OptionError(
            f"granularity is {granularity!r}: it must be one of {', '.join(get_args(Granularity))}",
            "granularity",
        )


def _pool(
    pos: NDArray[np.int32],
    scores: NDArray[Any],
    evictable: NDArray[np.bool_],
    axes: tuple[int, ...],
    granularity: Granularity,
) -> tuple[NDArray[np.int32], NDArray[Any], NDArray[np.bool_]]:
    first = pos[:1, :1] if axes == (0, 1) else pos[:, :1]
    n_different = int((pos != first).any(axis=axes).sum())
    if n_different:
        raise PolicyError(
            f"granularity {granularity!r} needs the same position in a cell of all heads it pools, but "
            f"{n_different} cells differ: entries were evicted per head before; start from an empty cache"
        )
    pooled: NDArray[np.float64] = np.sum(scores, axis=axes, dtype=np.float64, keepdims=True)
    return first, pooled, np.asarray(np.all(evictable, axis=axes, keepdims=True))


def _lowest(
    scores: NDArray[Any], pos: NDArray[np.int32], evictable: NDArray[np.bool_], n: int
) -> NDArray[np.intp]:
    """Return the columns of the n lowest scores of each row, lowest and oldest first: [n_rows, n].

    Each row must have n evictable ones or more.
    """
    n_rows, n_cells = scores.shape
    if n == 0:
        return np.zeros((n_rows, 0), np.intp)
    masked = np.array(scores, np.float32)
    masked[~evictable] = np.inf
    # n groups with a minimum of at most `limit` hold n scores of at most `limit`. Minima of a few groups are
    # cheap to find, and leave few candidates to sort.
    group = max(1, n_cells // (GROUPS_PER_VICTIM * n))
    n_groups = n_cells // group
    minima = masked[:, : group * n_groups].reshape(n_rows, group, n_groups).min(axis=1)
    limit = np.partition(minima, n - 1, axis=1)[:, n - 1 : n]
    if np.isnan(minima).any() or np.isnan(masked[:, group * n_groups :]).any():
        n_nan = np.count_nonzero(np.isnan(masked))
        raise PolicyError(f"{n_nan} scores are NaN: a score must be a number or an infinity")
    chosen = masked <= limit
    if np.isinf(limit).any():
        chosen &= evictable
    found = np.flatnonzero(chosen)
    rows, cells = np.divmod(found, n_cells)
    # The candidates of a row, behind them what sorts last.
    n_candidates = np.bincount(rows, minlength=n_rows)[:, None]
    is_candidate = np.arange(n_candidates.max()) < n_candidates

    def table(candidates: NDArray[Any], last: float) -> NDArray[Any]:
        filled = np.full(is_candidate.shape, last, candidates.dtype)
        filled[is_candidate] = candidates
        return filled

    oldest = table(pos.reshape(-1)[found], np.iinfo(np.int32).max)
    lowest = table(masked.reshape(-1)[found], np.inf)
    order = np.lexsort((oldest, lowest), axis=-1)[:, :n]
    return np.take_along_axis(table(cells, 0), order, axis=1)
