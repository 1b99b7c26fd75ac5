"""Work on rows of cells by the native part, in a fraction of numpy's time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.bindings import library
from h2o_gguf.bindings.library import ffi
from h2o_gguf.bindings.status import check
from h2o_gguf.rows import N_POSITIONS, Marks, Numbers, Positions

__all__ = ["NativeRows"]


class NativeRows:
    """An h2o_gguf.rows.Rows.

    Raises: LibraryError, as library.lib() does; ValueError, arrays of different shapes.
    """

    def __init__(self) -> None:
        self._lib = library.lib()

    def lowest(self, scores: Numbers, pos: Positions, evictable: Marks, n: int) -> NDArray[np.int32]:
        """int32[..., n], as Rows says."""
        out = np.empty((*scores.shape[:-1], n), np.int32)
        self._choose(self._lib.h2og_lowest, scores, pos, evictable, n, _in(out, np.int32))
        return out

    def highest(self, scores: Numbers, pos: Positions, evictable: Marks, n: int) -> Marks:
        """bool[..., n_cells], as Rows says."""
        out = np.empty(scores.shape, np.bool_)
        self._choose(self._lib.h2og_highest, scores, pos, evictable, n, _in(out, np.bool_))
        return out

    def within(self, pos: Positions, start: int, end: int) -> Marks:
        """bool of pos's shape, as Rows says."""
        out = np.empty(pos.shape, np.bool_)
        ends = min(start, N_POSITIONS), min(end, N_POSITIONS)
        check(self._lib.h2og_within(_in(pos, np.int32), pos.size, *ends, _in(out, np.bool_)))
        return out

    def rates(self, scores: Numbers, pos: Positions, n_past: int, sums: Numbers) -> Numbers:
        """float32[..., n_cells], as Rows says."""
        _check_equal(scores.shape, pos.shape)
        out = np.empty(scores.shape, np.float32)
        arrays = _in(scores, np.float32), _in(pos, np.int32)
        table = _in(sums, np.float32), len(sums)
        check(self._lib.h2og_rates(*arrays, scores.size, n_past, *table, _in(out, np.float32)))
        return out

    def carried(self, numbers: Numbers, was: Positions, now: Positions) -> Numbers:
        """float32[n, ..., n_now], as Rows says."""
        _check_equal(numbers.shape, (len(numbers), *was.shape))
        _check_equal(was.shape[:-1], now.shape[:-1])
        out = np.empty((len(numbers), *now.shape), np.float32)
        arrays = _in(numbers, np.float32), _in(was, np.int32), _in(now, np.int32)
        counts = len(numbers), math.prod(now.shape[:-1]), was.shape[-1], now.shape[-1]
        check(self._lib.h2og_carried(*arrays, *counts, _in(out, np.float32)))
        return out

    def distances(self, vectors: Numbers, n_last: int) -> Numbers:
        """float32[..., n_last], as Rows says."""
        *rows, n, dim = vectors.shape
        if not 0 <= n_last <= n:
            raise ValueError(f"n_last is {n_last}: it must be from 0 to {n}, of which there are vectors")
        out = np.empty((*rows, n_last), np.float32)
        counts = math.prod(rows), n, dim, n_last
        check(self._lib.h2og_distances(_in(vectors, np.float32), *counts, _in(out, np.float32)))
        return out

    def lengths(self, vectors: Numbers) -> Numbers:
        """float32[...], as Rows says."""
        *rows, dim = vectors.shape
        out = np.empty(rows, np.float32)
        check(self._lib.h2og_lengths(_in(vectors, np.float32), math.prod(rows), dim, _in(out, np.float32)))
        return out

    def _choose(
        self, choose: Any, scores: Numbers, pos: Positions, evictable: Marks, n: int, out: Any
    ) -> None:
        _check_equal(scores.shape, pos.shape)
        _check_equal(scores.shape, evictable.shape)
        arrays = _in(scores, np.float32), _in(pos, np.int32), _in(evictable, np.bool_)
        check(choose(*arrays, math.prod(scores.shape[:-1]), scores.shape[-1], n, out))


KINDS: dict[Any, str] = {np.float32: "float[]", np.int32: "int32_t[]", np.bool_: "uint8_t[]"}


def _in(array: NDArray[Any], kind: Any) -> Any:
    """Memory that holds the array's elements one after another: its own, or a copy's."""
    return ffi.from_buffer(KINDS[kind], np.ascontiguousarray(array, kind))


def _check_equal(shape: tuple[int, ...], other: tuple[int, ...]) -> None:
    if shape != other:
        raise ValueError(f"arrays of shape {shape} and {other} do not go together")
