"""KVCache: the eviction side of one llama_context, as numpy arrays and plain calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.bindings import library
from h2o_gguf.bindings.callbacks import Callbacks, as_cells
from h2o_gguf.bindings.library import ffi
from h2o_gguf.bindings.native_attic import NativeAttic
from h2o_gguf.bindings.native_view import NativeView, info_of, view_of
from h2o_gguf.bindings.observation import CacheObservation
from h2o_gguf.bindings.parameters import make_params
from h2o_gguf.bindings.status import check
from h2o_gguf.errors import ClosedError

__all__ = ["KVCache"]


class KVCache:
    """Attached to the KV cache of a llama_context until close(), or until the context is freed.

    ctx_address : address of a live llama_context.
    budget : entries per KV head after an eviction, 1 .. n_cells; 0: never evict.
    block : entries evicted at once while decoding, >= 1.
    decay : per token decay of the scores, (0, 1].
    attention : "auto", "fused", "composed" (llama.cpp's own, watched for scores) or "reference".
    n_pos_max : rotary positions stay below this; 0: the trained context.
    is_scored : sum the attention mass of every entry; otherwise scores stay 0.
    n_observed : the newest tokens whose queries are recorded, >= 0.
    seq : the sequence that the methods without an argument of their own speak of.

    Where layers were given caches of different sizes (set_layer_cells), this is the first of several groups;
    each starts with the same parameters, its budget at most its cells.

    Raises: BudgetError, OptionError for illegal values; UnsupportedModelError; LibraryError.
    """

    def __init__(
        self,
        ctx_address: int,
        *,
        budget: int,
        block: int = 64,
        decay: float = 1.0,
        attention: str = "auto",
        n_pos_max: int = 0,
        is_scored: bool = True,
        n_observed: int = 0,
        seq: int = 0,
    ) -> None:
        self._handle: Any = None
        self._is_borrowed = False
        self._others: tuple[KVCache, ...] = ()
        self._lib = library.lib()
        self.seq = seq
        self._params = make_params(budget, block, decay, attention, n_pos_max, is_scored, n_observed)
        out = ffi.new("h2og_cache **")
        check(self._lib.h2og_attach(ffi.cast("struct llama_context *", ctx_address), self._params, out))
        self._take(out[0])
        self._others = tuple(self._group(i) for i in range(1, check(self._lib.h2og_n_groups(self._handle))))

    def _take(self, handle: Any) -> None:
        self._handle = handle
        info = ffi.new("h2og_info *")
        check(self._lib.h2og_get_info(self._handle, info))
        self.info = info_of(info)
        self._callbacks = Callbacks(self._view, (self.n_layer, self.n_head_kv))
        self.layer_ids = self.view().layer_ids

    def _group(self, i: int) -> KVCache:
        out = ffi.new("h2og_cache **")
        check(self._lib.h2og_get_group(self._handle, i, out))
        group = KVCache.__new__(KVCache)
        group._lib, group.seq, group._params = self._lib, self.seq, self._params
        group._is_borrowed, group._others = True, ()
        group._take(out[0])
        return group

    @property
    def groups(self) -> tuple[KVCache, ...]:
        """The caches of this context, one for each number of cells: this one, and others that end with it."""
        return (self, *self._others)

    # Lifetime

    def close(self) -> None:
        """Detach.  The context goes on without eviction; a sequence that was evicted from is cleared.

        Calling twice is fine.
        """
        for group in self._others:
            group.close()
        handle, self._handle = self._handle, None
        if handle is not None and not self._is_borrowed:
            self._lib.h2og_detach(handle)
            self._callbacks.clear()

    def __enter__(self) -> KVCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at interpreter exit the library may be gone
            self.close()

    @property
    def handle(self) -> Any:
        """The native handle.  Raises: ClosedError."""
        if self._handle is None:
            raise ClosedError("this KV cache")
        return self._handle

    # Facts

    @property
    def n_layer(self) -> int:
        """Layers that entries are evicted from."""
        return self.info.n_layer

    @property
    def n_head_kv(self) -> int:
        """KV heads of each layer."""
        return self.info.n_head_kv

    @property
    def n_cells(self) -> int:
        """Cells of the cache: all the KV memory there ever is."""
        return self.info.n_cells

    @property
    def budget(self) -> int:
        """Entries per KV head after an eviction; 0: never evict."""
        return int(self._params.budget)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V as allocated."""
        return self.info.kv_bytes

    @property
    def used_bytes(self) -> int:
        """Of kv_bytes, the share of the cells that are used."""
        return self.kv_bytes * self.used() // self.n_cells

    @property
    def attic(self) -> NativeAttic:
        """Where evicted entries stay, once it is opened."""
        return NativeAttic(self)

    @property
    def n_observed(self) -> int:
        """The newest tokens whose queries are recorded."""
        return int(self._params.n_observed)

    def view(self) -> NativeView:
        """Return the present picture, after waiting for the backends.

        Valid until the next call, at most until close().
        """
        out = ffi.new("h2og_view *")
        check(self._lib.h2og_get_view(self.handle, self.seq, out))
        return self._view(out)

    def _view(self, native: Any) -> NativeView:
        return view_of(native, CacheObservation(self))

    @property
    def scores(self) -> NDArray[np.float32]:
        """float32[n_layer, n_head_kv, n_cells], read-only: the decayed attention mass of each entry."""
        return self.view().scores

    @property
    def pos(self) -> NDArray[np.int32]:
        """int32[n_layer, n_head_kv, n_cells], read-only: position of each entry, -1 empty."""
        return self.view().pos

    @property
    def rope_pos(self) -> NDArray[np.int32]:
        """int32[n_layer, n_head_kv, n_cells], read-only: position each key is rotated to, -1 empty."""
        return self.view().rope_pos

    def used(self) -> int:
        """Entries per KV head."""
        return self.view().n_used

    def n_past(self) -> int:
        """Next position of the sequence."""
        return self.view().n_past

    def rollback_min(self) -> int:
        """The smallest p for which removing every position >= p is exact."""
        return check(self._lib.h2og_rollback_min(self.handle, self.seq))

    def _counters(self) -> Any:
        out = ffi.new("h2og_counters *")
        check(self._lib.h2og_get_counters(self.handle, self.seq, out))
        return out

    @property
    def n_evicted(self) -> int:
        """Entries evicted per KV head since the sequence was cleared."""
        return int(self._counters().n_evicted)

    @property
    def n_evictions(self) -> int:
        """How often victims were named since the sequence was cleared."""
        return int(self._counters().n_evictions)

    @property
    def n_rebases(self) -> int:
        """How often the keys were re-rotated since the sequence was cleared."""
        return int(self._counters().n_rebases)

    # Eviction

    def set_params(
        self,
        *,
        budget: int,
        block: int,
        decay: float,
        attention: str = "auto",
        n_pos_max: int = 0,
        is_scored: bool = True,
        n_observed: int = 0,
    ) -> None:
        """Change what was given to the constructor.  Raises as it does."""
        params = make_params(budget, block, decay, attention, n_pos_max, is_scored, n_observed)
        check(self._lib.h2og_set_params(self.handle, params))
        self._params = params

    def set_query_weights(self, weights: NDArray[np.float32] | None) -> None:
        """Set the weights of the next batch's queries in the scores: float32[n], batch order; None: all 1."""
        w = np.ascontiguousarray([] if weights is None else weights, dtype=np.float32)
        check(self._lib.h2og_set_query_weights(self.handle, ffi.from_buffer("float[]", w), len(w)))

    def set_policy(self, fn: Callable[[NativeView, int], NDArray[np.int32]] | None) -> None:
        """Set who names victims: fn(view, n) -> int32[n_layer, n_head_kv, n], called inside llama_decode.

        What fn raises makes that llama_decode fail with DECODE_FAILED, and `raised()` returns it.
        """
        self._callbacks.set_policy(self.handle, fn)

    def set_observer(self, fn: Callable[[NativeView, int], None] | None) -> None:
        """Set who watches: fn(view, n_tokens), called after each ubatch.  See `raised`."""
        self._callbacks.set_observer(self.handle, fn)

    def raised(self) -> BaseException | None:
        """Return what a callback raised since the last call of this method, if anything."""
        return self._callbacks.raised()

    def evict(self, victims: NDArray[np.int32]) -> None:
        """Evict victims, int32[n_layer, n_head_kv, n] cells, now.

        Raises: PolicyError, a cell cannot be evicted.
        """
        n = np.shape(victims)[-1] if np.ndim(victims) == 3 else 0
        v = as_cells(victims, (self.n_layer, self.n_head_kv, n))
        check(self._lib.h2og_evict(self.handle, self.seq, ffi.from_buffer("int32_t[]", v), n))

    def make_room(self, n_keep: int) -> int:
        """Ask the policy until at most n_keep entries per KV head are left; return how many were evicted.

        Raises: what the policy raised; PolicyError; CacheFullError, there is no policy.
        """
        with self._callbacks.reraising():
            return check(self._lib.h2og_make_room(self.handle, self.seq, n_keep))

    def rebase(self) -> None:
        """Re-rotate every key to consecutive positions.  Raises: CacheFullError, positions are learned."""
        check(self._lib.h2og_rebase(self.handle, self.seq))

    # Contents

    def keys(self, layer: int, cells: NDArray[np.integer[Any]] | None = None) -> NDArray[np.float32]:
        """Return the keys of a layer, 0 .. n_layer - 1: float32[n_head_kv, n, head_dim_k].

        cells : int[n], those to read; None: all n_cells.
        """
        return self._read(self._lib.h2og_read_keys, layer, cells, self.info.head_dim_k)

    def values(self, layer: int, cells: NDArray[np.integer[Any]] | None = None) -> NDArray[np.float32]:
        """Return the values of a layer: float32[n_head_kv, n, head_dim_v].

        With MLA they are part of the keys.
        """
        return self._read(self._lib.h2og_read_values, layer, cells, self.info.head_dim_v)

    def _read(
        self, function: Any, layer: int, cells: NDArray[np.integer[Any]] | None, head_dim: int
    ) -> NDArray[np.float32]:
        n = self.n_cells if cells is None else len(cells)
        out = np.empty((self.n_head_kv, n, head_dim), dtype=np.float32)
        named = ffi.NULL
        if cells is not None:
            named = ffi.from_buffer("int32_t[]", np.ascontiguousarray(cells, np.int32))
        check(function(self.handle, self.seq, layer, named, n, ffi.from_buffer("float[]", out)))
        return out

    def save(self) -> bytes:
        """Return positions, scores, counters and recorded queries: what llama.cpp's own saved state lacks."""
        size = check(self._lib.h2og_state_size(self.handle, self.seq))
        out = ffi.new("uint8_t[]", size)
        check(self._lib.h2og_state_save(self.handle, self.seq, out, size))
        return bytes(ffi.buffer(out, size))

    def load(self, data: bytes | memoryview) -> None:
        """Restore what save() returned, after llama.cpp restored its own state.

        Raises: StateFileError, it does not fit.
        """
        check(self._lib.h2og_state_load(self.handle, self.seq, ffi.from_buffer("uint8_t[]", data), len(data)))
