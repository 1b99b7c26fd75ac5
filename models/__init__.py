"""What is known of a model before native code loads it: header, shape, support, memory, catalog."""

from __future__ import annotations

from h2o_gguf.models.catalog import DEFAULT_MODEL, list_models, path, remove, resolve
from h2o_gguf.models.download import FetchError, fetch
from h2o_gguf.models.header import Header, read_header
from h2o_gguf.models.memory import entry_bytes, kv_bytes, memory_bytes, query_bytes
from h2o_gguf.models.shape import ModelShape, read_shape, shape_of
from h2o_gguf.models.support import Support, cannot_generate, require_support, support

__all__ = [
    "DEFAULT_MODEL",
    "FetchError",
    "Header",
    "ModelShape",
    "Support",
    "cannot_generate",
    "entry_bytes",
    "fetch",
    "kv_bytes",
    "list_models",
    "memory_bytes",
    "path",
    "query_bytes",
    "read_header",
    "read_shape",
    "remove",
    "require_support",
    "resolve",
    "shape_of",
    "support",
]
