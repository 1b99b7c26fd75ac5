"""What the native part hands out: a picture of a sequence's cache, and the facts of a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.bindings.library import ffi
from h2o_gguf.bindings.rows import NativeRows
from h2o_gguf.observation import Observation
from h2o_gguf.rows import Rows

__all__ = ["CacheInfo", "NativeView", "info_of", "view_of"]


@dataclass(frozen=True)
class NativeView:
    """One sequence's cache as the native part hands it to a callback.

    scores : float32[n_layer, n_head_kv, n_cells]. pos, rope_pos : int32 of the same shape, -1 empty.
    recalled : bool of the same shape, fetched back by the sequence's last recall.
    n_used : entries per KV head. n_past : next position. decay : per token. layer_ids : model layers.
    The arrays are read-only views of native memory, valid until the next call on the cache: copy what must
    last. observation : keys, values and recorded queries, read when asked for. rows : works on such arrays.
    """

    scores: NDArray[np.float32]
    pos: NDArray[np.int32]
    rope_pos: NDArray[np.int32]
    recalled: NDArray[np.bool_]
    n_used: int
    n_past: int
    decay: float
    layer_ids: tuple[int, ...]
    observation: Observation
    rows: Rows


@dataclass(frozen=True)
class CacheInfo:
    """Facts of a cache as it was attached.

    is_host : all layers lie in host memory. kv_bytes : K and V as allocated, sliding-window layers included.
    query_bytes : of the recorded queries.
    """

    n_layer: int
    n_head_kv: int
    n_cells: int
    n_stream: int
    head_dim_k: int
    head_dim_v: int
    type_k: int
    type_v: int
    n_pos_max: int
    can_renumber: bool
    is_host: bool
    kv_bytes: int
    query_bytes: int


def info_of(native: Any) -> CacheInfo:
    """Return an h2og_info as a CacheInfo."""
    return CacheInfo(
        n_layer=native.n_layer,
        n_head_kv=native.n_head_kv,
        n_cells=native.n_cells,
        n_stream=native.n_stream,
        head_dim_k=native.head_dim_k,
        head_dim_v=native.head_dim_v,
        type_k=native.type_k,
        type_v=native.type_v,
        n_pos_max=native.n_pos_max,
        can_renumber=bool(native.can_renumber),
        is_host=bool(native.is_host),
        kv_bytes=native.kv_bytes,
        query_bytes=native.query_bytes,
    )


def view_of(native: Any, observation: Observation) -> NativeView:
    """Return an h2og_view as a NativeView, without copying its arrays."""
    shape = (native.n_layer, native.n_head_kv, native.n_cells)

    def array(pointer: Any, dtype: Any) -> NDArray[Any]:
        flat = np.frombuffer(ffi.buffer(pointer, np.dtype(dtype).itemsize * math.prod(shape)), dtype=dtype)
        flat.setflags(write=False)
        return flat.reshape(shape)

    return NativeView(
        scores=array(native.scores, np.float32),
        pos=array(native.pos, np.int32),
        rope_pos=array(native.rope_pos, np.int32),
        recalled=array(native.recalled, np.bool_),
        n_used=native.n_used,
        n_past=native.n_past,
        decay=native.decay,
        layer_ids=tuple(native.layer_ids[i] for i in range(native.n_layer)),
        observation=observation,
        rows=NativeRows(),
    )
