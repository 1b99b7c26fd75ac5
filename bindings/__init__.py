"""cffi over the C header h2og.h: the only place that knows of `ffi` or of the native library."""

from h2o_gguf.bindings.cache import CacheInfo, KVCache, NativeView, check_context
from h2o_gguf.bindings.library import library_path, point_llama_cpp_here, version

__all__ = ["CacheInfo", "KVCache", "NativeView", "check_context", "library_path", "version"]

point_llama_cpp_here()
