"""What a policy may read of a cache besides scores: layer by layer, and only what it asks for."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.bindings import library
from h2o_gguf.bindings.library import ffi
from h2o_gguf.bindings.status import check
from h2o_gguf.observation import Cells, Floats, Rotation

if TYPE_CHECKING:
    from h2o_gguf.bindings.cache import KVCache

__all__ = ["CacheObservation"]


class CacheObservation:
    """An h2o_gguf.observation.Observation of the sequence of a cache; row is 0 .. n_layer - 1.

    Its methods may be called from a policy. What they return is a copy of what the cache holds by then.

    Raises: NativeError, row is no layer, or a device failed; ClosedError.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._lib = library.lib()

    @cached_property
    def query_pos(self) -> NDArray[np.int32]:
        """int32[n_observed]: positions of the recorded queries, oldest first; -1 where there are none yet."""
        out = np.empty(self._cache.n_observed, np.int32)
        if out.size:
            pointer = ffi.from_buffer("int32_t[]", out)
            check(self._lib.h2og_read_query_pos(self._cache.handle, self._cache.seq, pointer))
        return out

    def keys(self, row: int, cells: Cells | None = None) -> Floats:
        """float32[n_head_kv, n, head_dim_k], 0 in cells that were never used."""
        return self._cache.keys(row, cells)

    def values(self, row: int, cells: Cells | None = None) -> Floats:
        """float32[n_head_kv, n, head_dim_v]."""
        return self._cache.values(row, cells)

    def queries(self, row: int) -> Floats:
        """float32[n_head_kv, n_group, n_observed, head_dim_k], 0 where there are none yet.

        As the attention saw them, after rotation and before scaling. When keys were renumbered, they are
        turned to where a query of their position would be now.
        """
        n_head, n_head_kv = self._layer(row).n_head, self._cache.n_head_kv
        out = np.empty(
            (self._cache.n_observed, n_head_kv, n_head // n_head_kv, self._cache.info.head_dim_k), np.float32
        )
        if out.size:
            pointer = ffi.from_buffer("float[]", out)
            check(self._lib.h2og_read_queries(self._cache.handle, self._cache.seq, row, pointer))
        queries: Floats = out.transpose(1, 2, 0, 3)
        return queries

    def logits(self, row: int, queries: Floats, keys: Floats) -> NDArray[np.float32]:
        """Scaled and capped logits: float32[n_head_kv, n_group, n_query, n_cells].

        queries : float32[n_head_kv, n_group, n_query, head_dim_k].
        keys : float32[n_head_kv, n_cells, head_dim_k].
        """
        layer = self._layer(row)
        n_head_kv, n_group, n_query, head_dim = queries.shape
        flat = np.asarray(queries, np.float32).reshape(n_head_kv, n_group * n_query, head_dim)
        logits: NDArray[np.float32] = flat @ np.asarray(keys, np.float32).swapaxes(-1, -2)
        logits *= np.float32(layer.scale)
        if layer.softcap:
            logits /= np.float32(layer.softcap)
            np.tanh(logits, out=logits)
            logits *= np.float32(layer.softcap)
        return logits.reshape(n_head_kv, n_group, n_query, keys.shape[-2])

    def sinks(self, row: int) -> Floats | None:
        """Logits of the heads' own sinks: float32[n_head_kv, n_group]; None where there are none."""
        layer = self._layer(row)
        if not layer.has_sinks:
            return None
        out = np.empty(layer.n_head, np.float32)
        check(self._lib.h2og_read_sinks(self._cache.handle, row, ffi.from_buffer("float[]", out)))
        return out.reshape(self._cache.n_head_kv, -1)

    def rotation(self, row: int) -> Rotation | None:
        """How the layer rotates queries and keys; None where it does not."""
        n = self._layer(row).n_pair
        if n == 0:
            return None
        first, second, angle = np.empty(n, np.int32), np.empty(n, np.int32), np.empty(n, np.float64)
        check(
            self._lib.h2og_read_rotation(
                self._cache.handle,
                row,
                ffi.from_buffer("int32_t[]", first),
                ffi.from_buffer("int32_t[]", second),
                ffi.from_buffer("double[]", angle),
            )
        )
        return Rotation(first.astype(np.int64), second.astype(np.int64), angle)

    def _layer(self, row: int) -> Any:
        out = ffi.new("h2og_layer *")
        check(self._lib.h2og_get_layer(self._cache.handle, row, out))
        return out
