"""Choosing victims by score: one vectorised selection for every policy."""

from __future__ import annotations

import math
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import BudgetError, OptionError, PolicyError
from h2o_gguf.view import CacheView

__all__ = ["Cells", "Granularity", "counts", "nth_highest", "select_lowest"]

Cells: TypeAlias = NDArray[np.int32]  # [n_layer, n_head_kv, n], cell indices
Granularity = Literal["head", "layer", "token"]  # who shares one list of victims

POOLED_AXES: dict[str, tuple[int, ...]] = {"head": (), "layer": (1,), "token": (0, 1)}
GROUPS_PER_VICTIM = 4
ROWS_AT_ONCE = 64  # 1 MB of scores at 4,096 cells
N_SAMPLE, DEVIATIONS = 512, 3  # of a row, to guess where its n-th highest lies, and how far off that may be


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
    n_evictable = int(counts(evictable).min())
    if n_evictable < n:
        raise BudgetError(
            f"{n} entries must go from every KV head, but only {n_evictable} of {view.n_used} may: "
            "raise the budget (kv_budget), or protect less",
            n_protected=view.n_used - n_evictable,
        )
    rows = pos.shape[0] * pos.shape[1], pos.shape[-1]
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
    found, is_there = _in_rows(chosen)
    keys = _in_order(masked.reshape(-1)[found], pos.reshape(-1)[found])
    order = np.argsort(_table(is_there, keys, np.iinfo(np.int64).max), axis=-1)[:, :n]
    cells: NDArray[np.intp] = np.take_along_axis(_table(is_there, found, 0), order, axis=1) % n_cells
    return cells


def nth_highest(numbers: NDArray[np.float32], n: int) -> NDArray[np.float32]:
    """Return the n-th highest number of each row, NaN aside: float32[..., 1].

    numbers : float32[..., n_cells]. n : 1 to n_cells.

    Source: a sample tells between which two numbers it lies, as in Floyd and Rivest, CACM 18 (3), 1975; the
    counts tell whether that is so.
    """
    rows = numbers.reshape(-1, numbers.shape[-1])
    n_cells = rows.shape[1]
    sample = np.sort(rows[:, :: max(1, n_cells // N_SAMPLE)], axis=1)
    last = sample.shape[1] - 1
    middle, margin = last * (1 - n / n_cells), DEVIATIONS * math.sqrt(last + 1) / 2
    low = sample[:, max(0, int(middle - margin)), None]
    high = sample[:, min(last, int(middle + margin) + 1), None]
    above = rows > high
    chosen = rows >= low
    chosen ^= above
    rank = n - counts(above)
    is_missed = (rank < 1) | (rank > counts(chosen))
    found, is_there = _in_rows(chosen)
    between = np.sort(_table(is_there, rows.reshape(-1)[found], -np.inf), axis=1)
    nth = np.take_along_axis(between, -np.where(is_missed, 1, rank)[:, None], axis=1)
    if is_missed.any():
        nth[is_missed] = np.partition(rows[is_missed], -n, axis=1)[:, -n, None]
    return nth.reshape(*numbers.shape[:-1], 1)


def _in_order(scores: NDArray[np.float32], pos: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return integers in the order of the scores, and of positions among equals.  No NaN."""
    bits = (scores + np.float32(0)).view(np.int32)  # the sum is 0 for both zeros
    bits ^= (bits >> 31) & np.int32(0x7FFFFFFF)  # of negative floats, those with more bits are lower
    keys: NDArray[np.int64] = (bits.astype(np.int64) << 32) + pos
    return keys


def counts(chosen: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return how many are chosen: int32[...]."""
    n_chosen: NDArray[np.int32] = chosen.view(np.uint8).sum(axis=-1, dtype=np.int32)
    return n_chosen


def _in_rows(chosen: NDArray[np.bool_]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
    """Return the flat indices of what is chosen, and where they stand in a table of as many rows."""
    n_chosen = counts(chosen)
    return np.flatnonzero(chosen), np.arange(n_chosen.max()) < n_chosen[:, None]


def _table(is_there: NDArray[np.bool_], items: NDArray[Any], otherwise: float) -> NDArray[Any]:
    filled = np.full(is_there.shape, otherwise, items.dtype)
    filled[is_there] = items
    return filled
