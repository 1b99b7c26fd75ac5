"""Choosing by score: one selection for every policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import BudgetError, OptionError, PolicyError
from h2o_gguf.view import CacheView

__all__ = ["Cells", "Granularity", "fewest", "select_highest", "select_lowest"]

Cells: TypeAlias = NDArray[np.int32]  # [n_layer, n_head_kv, n], cell indices
Granularity = Literal["head", "layer", "token"]  # who shares one list of victims

POOLED_AXES: dict[str, tuple[int, ...]] = {"head": (), "layer": (1,), "token": (0, 1)}


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
    pos, scores, evictable = _pool(view, scores, evictable, granularity)
    with _saying_how_few(view, evictable, n):
        victims = view.rows.lowest(scores, pos, evictable, n)
    return np.array(np.broadcast_to(victims, (*view.shape[:2], n)), np.int32)


def select_highest(
    view: CacheView,
    scores: NDArray[Any],
    evictable: NDArray[np.bool_],
    n: int,
    granularity: Granularity = "head",
) -> NDArray[np.bool_]:
    """Return which are the n evictable entries with the highest scores: bool[n_layer, n_head_kv, n_cells].

    Of equal scores the newest is higher. All else as in select_lowest, which would leave them to the last.
    """
    pos, scores, evictable = _pool(view, scores, evictable, granularity)
    with _saying_how_few(view, evictable, n):
        is_high = view.rows.highest(scores, pos, evictable, n)
    return np.broadcast_to(is_high, view.shape)


def fewest(evictable: NDArray[np.bool_]) -> int:
    """Return how many entries may go where they are fewest."""
    return int(evictable.view(np.uint8).sum(axis=-1, dtype=np.int32).min())


@contextlib.contextmanager
def _saying_how_few(view: CacheView, evictable: NDArray[np.bool_], n: int) -> Iterator[None]:
    try:
        yield
    except BudgetError as error:
        n_evictable = fewest(evictable)
        raise BudgetError(
            f"{n} entries must go from every KV head, but only {n_evictable} of {view.n_used} may: "
            "raise the budget (kv_budget), or protect less",
            n_protected=view.n_used - n_evictable,
        ) from error


def check_granularity(granularity: str) -> None:
    """Raise OptionError unless granularity is "head", "layer" or "token"."""
    if granularity not in get_args(Granularity):
        raise OptionError(
            f"granularity is {granularity!r}: it must be one of {', '.join(get_args(Granularity))}",
            "granularity",
        )


def _pool(
    view: CacheView, scores: NDArray[Any], evictable: NDArray[np.bool_], granularity: Granularity
) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.bool_]]:
    """Return positions, scores and what may go, of one row where several share their victims."""
    check_granularity(granularity)
    axes = POOLED_AXES[granularity]
    if not axes:
        return view.pos, np.asarray(scores, np.float32), evictable
    first = view.pos[:1, :1] if axes == (0, 1) else view.pos[:, :1]
    n_different = int((view.pos != first).any(axis=axes).sum())
    if n_different:
        raise PolicyError(
            f"granularity {granularity!r} needs the same position in a cell of all heads it pools, but "
            f"{n_different} cells differ: entries were evicted per head before; start from an empty cache"
        )
    pooled: NDArray[np.float64] = np.sum(scores, axis=axes, dtype=np.float64, keepdims=True)
    return first, pooled.astype(np.float32), np.asarray(np.all(evictable, axis=axes, keepdims=True))
