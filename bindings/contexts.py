"""What is asked of a context or a model before a cache is attached."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_gguf.bindings import library
from h2o_gguf.bindings.library import ffi
from h2o_gguf.bindings.status import check

__all__ = ["check_context", "set_layer_cells"]


def check_context(ctx_address: int) -> None:
    """Raise UnsupportedModelError if the cache of this llama_context cannot be evicted from.

    ctx_address : address of a live llama_context.
    """
    check(library.lib().h2og_check(ffi.cast("struct llama_context *", ctx_address)))


def set_layer_cells(model_address: int, n_cells: Sequence[int]) -> None:
    """Set how many cells the cache of each layer gets in the contexts made of this llama_model from now on.

    n_cells : one a model layer; 0: as many as the context, which is also the most. Layers of equal numbers
        share a cache, whose cells llama.cpp rounds up to a multiple of 256. Empty: all layers as the context.

    Raises: OptionError, another number of layers; UnsupportedModelError.
    """
    cells = ffi.new("int32_t[]", [int(n) for n in n_cells])
    model = ffi.cast("struct llama_model *", model_address)
    check(library.lib().h2og_set_layer_cells(model, cells, len(n_cells)))
