"""NativeAttic: where the evicted entries of a cache stay, and how they are recalled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.bindings import library
from h2o_gguf.bindings.library import ffi
from h2o_gguf.bindings.status import check, check_options

if TYPE_CHECKING:
    from h2o_gguf.bindings.cache import KVCache

__all__ = ["AtticInfo", "NativeAttic"]

Alike = Literal["head", "layer", "token"]
ALIKE: dict[Alike, int] = {"head": 0, "layer": 1, "token": 2}  # H2OG_ALIKE_*
OWN_TYPE = -1
NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class AtticInfo:
    """What an attic holds.

    n_entry : per KV head. bytes : of rows, as allocated; max_bytes : the limit, 0 without an attic.
    n_dropped, n_recalled : entries of all layers and heads since the sequence was cleared.
    """

    n_entry: int
    bytes: int
    max_bytes: int
    n_dropped: int
    n_recalled: int


class NativeAttic:
    """Of one cache, or of one group; it keeps nothing until it is opened."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._lib = library.lib()

    def open(
        self, max_bytes: int, *, type_k: int = OWN_TYPE, type_v: int = OWN_TYPE, folder: Path | None = None
    ) -> None:
        """Keep what is evicted from now on; forget what was kept before.

        max_bytes : of rows; beyond it the least-scored are dropped; 0: keep nothing. type_k, type_v :
        ggml_type, -1: the cache's own. folder : of a file that nobody else sees; None: in memory.

        Raises: OptionError, too few bytes, a type that does not fit, a folder that takes no file.
        """
        name = ffi.NULL if folder is None else ffi.new("char[]", os.fsencode(folder))
        params = ffi.new("h2og_attic_params *", {"max_bytes": max_bytes, "type_k": type_k, "type_v": type_v})
        params.folder = name
        check_options(
            self._lib.h2og_set_attic(self._cache.handle, params), "attic", "attic_limit", "attic_type"
        )

    def info(self) -> AtticInfo:
        """What it holds now."""
        out: Any = ffi.new("h2og_attic_info *")
        check(self._lib.h2og_get_attic(self._cache.handle, self._cache.seq, out))
        return AtticInfo(out.n_entry, out.bytes, out.max_bytes, out.n_dropped, out.n_recalled)

    def positions(self, layer: int) -> NDArray[np.int32]:
        """Positions of a layer's entries, 0 .. n_layer - 1, in no order: int32[n_head_kv, n_entry]."""
        out = np.empty((self._cache.n_head_kv, self.info().n_entry), np.int32)
        if out.size:
            pointer = ffi.from_buffer("int32_t[]", out)
            check(self._lib.h2og_read_attic_pos(self._cache.handle, self._cache.seq, layer, pointer))
        return out

    def recall_next(
        self,
        keep: Sequence[tuple[int, int]] = (),
        *,
        n_most: int = NO_LIMIT,
        n_asked: int = NO_LIMIT,
        ask_every: int = 1,
        n_before: int = 0,
        n_after: int = 0,
        n_exact: int = 0,
        alike: Alike = "head",
    ) -> None:
        """Let the queries of the next batch fetch back what they attend to, before each layer attends.

        keep : spans of positions whose entries stay in the cache. n_most : entries of each KV head that are
        exchanged. n_asked, ask_every : of the batch's newest n_asked tokens each ask_every-th asks. n_before,
        n_after : neighbours that come with what is asked for. n_exact : newest tokens that attend to what
        stays in the attic too, as if nothing were evicted; not by llama.cpp's own attention. alike : who
        exchanges the same positions, as granularity has it. For "token" the batch only asks: roll it back,
        call recall_asked, and decode it again.

        Raises: OptionError, the attic is not open, or a number is negative.
        """
        spans = ffi.new("h2og_span[]", [{"first": a, "end": b} for a, b in keep] or 1)
        params = ffi.new(
            "h2og_recall_params *", [n_most, n_asked, ask_every, n_before, n_after, ALIKE[alike], n_exact]
        )
        code = self._lib.h2og_recall_next(self._cache.handle, self._cache.seq, spans, len(keep), params)
        check_options(code, "attic")

    def withdraw(self) -> None:
        """Let the next batch recall nothing after all."""
        check(self._lib.h2og_withdraw_recall(self._cache.handle, self._cache.seq))

    def recall_asked(self) -> None:
        """Exchange what the batch asked for that was rolled back.  Raises: OptionError, it did not ask."""
        check_options(self._lib.h2og_recall_asked(self._cache.handle, self._cache.seq), "attic")
