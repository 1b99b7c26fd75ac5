"""Work on rows of cells, one per layer and KV head, that policies and what carries their numbers share."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import BudgetError, PolicyError

__all__ = ["PLAIN", "Marks", "Numbers", "PlainRows", "Positions", "Rows", "directions", "taken"]

Numbers = NDArray[np.float32]
Positions = NDArray[np.int32]
Marks = NDArray[np.bool_]
Scalar = TypeVar("Scalar", bound=np.generic)

N_POSITIONS = 2**31  # positions are int32


class Rows(Protocol):
    """Who does the work, with the same answers. Rows are the last axis of arrays, [..., n_cells]."""

    def lowest(self, scores: Numbers, pos: Positions, evictable: Marks, n: int) -> NDArray[np.int32]:
        """Return the n evictable cells of each row with the lowest scores, lowest first: int32[..., n].

        Of equal scores the oldest goes first.
        Raises: BudgetError, a row has fewer than n. PolicyError, a score is NaN.
        """

    def highest(self, scores: Numbers, pos: Positions, evictable: Marks, n: int) -> Marks:
        """Return which are the n evictable cells of each row with the highest scores: bool[..., n_cells].

        Of equal scores the newest is higher.  Raises: as for lowest.
        """

    def within(self, pos: Positions, start: int, end: int) -> Marks:
        """Return which positions lie from start on, before end: bool of pos's shape.  start, end : >= 0."""

    def rates(self, scores: Numbers, pos: Positions, n_past: int, sums: Numbers) -> Numbers:
        """Return scores divided by sums[n_past - pos], or by the last of sums: float32[..., n_cells].

        sums : float32[n_age]. pos : below n_past.
        """

    def carried(self, numbers: Numbers, was: Positions, now: Positions) -> Numbers:
        """Return the numbers of entries that lay as in `was`, where they lie now: float32[n, ..., n_now].

        0 in empty cells, and for entries that `was` lacks.
        numbers : float32[n, ..., n_was]. was, now : [..., n_was] and [..., n_now], below 0 in empty cells.
        """

    def distances(self, vectors: Numbers, n_last: int) -> Numbers:
        """Return 1 - cos of the last vectors to the mean of their row's directions: float32[..., n_last].

        1 for a vector of 0, which has no direction.  vectors : float32[..., n, dim]. n_last : 0 to n.
        """

    def lengths(self, vectors: Numbers) -> Numbers:
        """Return the lengths of vectors: float32[..., dim] -> float32[...]."""


class PlainRows:
    """Rows in numpy: the reference, for views that do not come from a native cache."""

    def lowest(self, scores: Numbers, pos: Positions, evictable: Marks, n: int) -> NDArray[np.int32]:
        """As Rows says: the first n of all in order."""
        return _in_order(scores, pos, evictable, n)[..., :n].astype(np.int32)

    def highest(self, scores: Numbers, pos: Positions, evictable: Marks, n: int) -> Marks:
        """As Rows says: the last n of all in order that are evictable."""
        rank = np.argsort(_in_order(scores, pos, evictable, n), axis=-1)
        n_evictable = np.count_nonzero(evictable, axis=-1, keepdims=True)
        return np.asarray((rank >= n_evictable - n) & (rank < n_evictable))

    def within(self, pos: Positions, start: int, end: int) -> Marks:
        """As Rows says."""
        return np.asarray((pos >= start) & (pos < end))

    def rates(self, scores: Numbers, pos: Positions, n_past: int, sums: Numbers) -> Numbers:
        """As Rows says."""
        return np.asarray(scores / sums.take(n_past - pos, mode="clip"), np.float32)

    def carried(self, numbers: Numbers, was: Positions, now: Positions) -> Numbers:
        """As Rows says: each entry is looked up in a list of all."""
        carried = np.zeros((len(numbers), *now.shape), np.float32)
        left, taken = np.flatnonzero(was >= 0), np.flatnonzero(now >= 0)
        _, source, to = np.intersect1d(
            _ids(was, left), _ids(now, taken), assume_unique=True, return_indices=True
        )
        carried.reshape(len(numbers), -1)[:, taken[to]] = numbers.reshape(len(numbers), -1)[:, left[source]]
        return carried

    def distances(self, vectors: Numbers, n_last: int) -> Numbers:
        """As Rows says."""
        units = directions(vectors)
        mean = directions(units.sum(-2, keepdims=True))
        last = units[..., units.shape[-2] - n_last :, :]
        return np.asarray(1 - (last @ mean.swapaxes(-1, -2))[..., 0], np.float32)

    def lengths(self, vectors: Numbers) -> Numbers:
        """As Rows says."""
        return np.asarray(np.sqrt(np.einsum("...d,...d->...", vectors, vectors)), np.float32)


def directions(
    vectors: NDArray[np.floating[Any]], held: NDArray[np.bool_] | None = None
) -> NDArray[np.floating[Any]]:
    """Return vectors divided by their lengths; 0 stays 0, and so does what is not held: [..., dim]."""
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    units: NDArray[np.floating[Any]] = vectors / np.maximum(lengths, np.finfo(vectors.dtype).tiny)
    return units if held is None else np.where(held[..., None], units, 0)


def taken(array: NDArray[Scalar], cells: NDArray[np.integer[Any]]) -> NDArray[Scalar]:
    """Return some cells of each row, as np.take_along_axis does in three times as long: [..., n].

    array : [..., n_cells]. cells : int[..., n], from 0 to n_cells - 1.
    """
    *rows, n_cells = array.shape
    starts = np.arange(0, array.size, n_cells).reshape(*rows, 1)
    return array.reshape(-1).take(starts + cells)


PLAIN: Rows = PlainRows()


def _in_order(scores: Numbers, pos: Positions, evictable: Marks, n: int) -> NDArray[np.intp]:
    """Return the cells of each row by score and position, those that may not go last: [..., n_cells]."""
    n_evictable = int(np.count_nonzero(evictable, axis=-1).min())
    if n_evictable < n:
        raise BudgetError(
            f"a budget too small to let {n} entries of every row go: of one only {n_evictable} may"
        )
    n_nan = np.count_nonzero(np.isnan(scores) & evictable)
    if n_nan:
        raise PolicyError(f"{n_nan} scores are NaN: a score must be a number or an infinity")
    return np.lexsort((pos, scores, ~evictable))


def _ids(pos: Positions, cells: NDArray[np.intp]) -> NDArray[np.int64]:
    """One number per row and position, of cells counted through all rows."""
    ids: NDArray[np.int64] = (cells // pos.shape[-1]) * N_POSITIONS + pos.reshape(-1)[cells]
    return ids
