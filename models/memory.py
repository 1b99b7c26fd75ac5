"""KV bytes, exactly as the runtime allocates them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from h2o_gguf.errors import OptionError
from h2o_gguf.models.shape import ModelShape

__all__ = [
    "CACHE_TYPES",
    "CELL_PAD",
    "MAX_CELLS",
    "MemoryBytes",
    "entry_bytes",
    "kv_bytes",
    "memory_bytes",
    "pad_cells",
    "query_bytes",
    "type_problem",
]

CELL_PAD = 256  # llama.cpp rounds the number of cells up to a multiple of this
MAX_CELLS = (1 << 31) - CELL_PAD  # cells and positions are signed 32-bit numbers
SPLIT = ("iswa", "hybrid-iswa")  # kinds of memory whose windowed layers have a cache of their own
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "iq4_nl")


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes of one context's memory. full : KV of full-attention layers; window : KV of windowed layers;

    state : recurrent state. n_cells, n_cells_window : cells of each cache, after padding.
    """

    full: int
    window: int
    state: int
    n_cells: int
    n_cells_window: int

    @property
    def kv(self) -> int:
        return self.full + self.window

    @property
    def total(self) -> int:
        return self.kv + self.state


def pad_cells(n: int) -> int:
    """n rounded up to the next multiple of 256."""
    return -(-n // CELL_PAD) * CELL_PAD


def kv_bytes(
    shape: ModelShape,
    n_cells: int,
    n_ubatch: int = 512,
    type_k: str = "f16",
    type_v: str = "f16",
    *,
    flash_attn: bool = True,
    swa_full: bool = False,
) -> int:
    """Bytes of K and V for one sequence, windowed layers included, recurrent state not.

    n_cells : cells asked for, >= 1. n_ubatch : tokens computed at once; sizes the windowed caches.
    type_k, type_v : one of CACHE_TYPES. flash_attn : without it V is as wide as the widest layer's.
    swa_full : windowed layers get n_cells as well (the context parameter of that name, whose default in
    llama.h is true).
    Raises OptionError: a size below 1, an unknown type, or one the heads do not fit.
    """
    return memory_bytes(shape, n_cells, n_ubatch, type_k, type_v, flash_attn=flash_attn, swa_full=swa_full).kv


def memory_bytes(
    shape: ModelShape,
    n_cells: int,
    n_ubatch: int = 512,
    type_k: str = "f16",
    type_v: str = "f16",
    *,
    flash_attn: bool = True,
    swa_full: bool = False,
    layer_cells: Sequence[int] = (),
) -> MemoryBytes:
    """All parts of one context's memory for one sequence.

    flash_attn : without it V is stored transposed, as wide as the widest layer's.
    layer_cells : cells asked for by model layer, 0 is n_cells; empty: n_cells for all. Windowed layers
        ignore theirs.
    swa_full, Raises : as kv_bytes.
    """
    if n_cells < 1 or n_ubatch < 1:
        raise OptionError(
            f"n_cells {n_cells} and n_ubatch {n_ubatch} must be at least 1", "ctx-size", "ubatch-size"
        )
    problem = type_problem(shape, type_k, type_v, flash_attn=flash_attn)
    if problem:
        raise OptionError(problem, "cache-type-k", "cache-type-v")
    cells = pad_cells(n_cells)
    window = cells if swa_full else pad_cells(min(cells, shape.n_swa + min(n_ubatch, n_cells)))
    v_width = max((_width(shape, il)[1] for il in range(shape.n_layer_all)), default=0)

    def size(layers: Iterable[int], n: int, own: Sequence[int] = ()) -> int:
        total = 0
        for il in layers:
            k, v = _width(shape, il)
            if not flash_attn and not shape.is_mla:
                v = v_width
            total += (pad_cells(own[il]) if own and own[il] else n) * (
                _row_bytes(type_k, k) + _row_bytes(type_v, v)
            )
        return total

    full, windowed = _split(shape)
    n_state = sum(shape.recurrent_layers[: shape.n_layer])
    return MemoryBytes(
        full=size(full, cells, layer_cells),
        window=size(windowed, window),
        state=n_state * 4 * (shape.n_embd_r + shape.n_embd_s),
        n_cells=cells,
        n_cells_window=window if shape.memory in SPLIT else 0,
    )


def entry_bytes(shape: ModelShape, type_k: str = "f16", type_v: str = "f16") -> int:
    """Bytes of one token's K and V in the layers that are evicted from; the types must fit the heads."""
    widths = [_width(shape, il) for il in _split(shape)[0]]
    return sum(_row_bytes(type_k, k) + _row_bytes(type_v, v) for k, v in widths)


def query_bytes(shape: ModelShape, n_observed: int) -> int:
    """Bytes that the recorded queries of the newest n_observed tokens of one sequence take, as float32."""
    return n_observed * sum(4 * shape.n_head[il] * shape.head_dims(il)[0] for il in _split(shape)[0])


def type_problem(shape: ModelShape, type_k: str, type_v: str, *, flash_attn: bool = True) -> str:
    """Why the runtime would refuse these cache types for this model; "" if it would not."""
    for option, name in (("cache-type-k", type_k), ("cache-type-v", type_v)):
        if name not in CACHE_TYPES:
            return f"{option} {name!r} is unknown; choose one of {', '.join(CACHE_TYPES)}"
    if shape.is_mla and type_k != type_v:
        return f"this model keeps no V, so cache-type-k ({type_k}) and cache-type-v ({type_v}) must be equal"
    if _block(type_v)[0] > 1 and not flash_attn:
        return f"cache-type-v {type_v} needs flash attention: add --flash-attn on, or use f16 for V"
    for il in shape.attention_layers:
        for option, name, dim in zip(
            ("cache-type-k", "cache-type-v"), (type_k, type_v), shape.head_dims(il), strict=True
        ):
            if dim % _block(name)[0]:
                return f"{option} {name} packs {_block(name)[0]} values, the heads of layer {il} have {dim}"
    return ""


def _split(shape: ModelShape) -> tuple[list[int], list[int]]:
    """Layers in the full cache, and in the windowed one."""
    full = list(shape.evicted_layers)
    return full, [il for il in shape.attention_layers if il not in full]


def _width(shape: ModelShape, il: int) -> tuple[int, int]:
    k, v = shape.head_dims(il)
    return k * shape.n_head_kv[il], v * shape.n_head_kv[il]


def _block(name: str) -> tuple[int, int]:
    return GGML_QUANT_SIZES[GGMLQuantizationType[name.upper()]]


def _row_bytes(name: str, n: int) -> int:
    block, size = _block(name)
    return n // block * size
