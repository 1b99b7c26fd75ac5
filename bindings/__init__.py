"""cffi over the C header h2og.h: the only place that knows of `ffi` or of the native library."""

from h2o_gguf.bindings.cache import KVCache
from h2o_gguf.bindings.contexts import check_context, set_layer_cells
from h2o_gguf.bindings.groups import GroupedCache
from h2o_gguf.bindings.library import library_path, point_llama_cpp_here, version
from h2o_gguf.bindings.native_view import CacheInfo, NativeView

__all__ = [
    "CacheInfo",
    "GroupedCache",
    "KVCache",
    "NativeView",
    "check_context",
    "library_path",
    "set_layer_cells",
    "version",
]

point_llama_cpp_here()
