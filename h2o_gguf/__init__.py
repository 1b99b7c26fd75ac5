"""A GGUF runtime whose KV cache stays inside a budget you set, for ever.

`H2OLlama` drops in for `llama_cpp.Llama`. Names are loaded on first use, so that policies and errors can be
used without the native library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h2o_gguf.cancel import CancelToken
    from h2o_gguf.engine import Engine
    from h2o_gguf.llama import H2OLlama
    from h2o_gguf.report import KVReport
    from h2o_gguf.view import CacheView

__version__ = "0.1.0"

_HOMES = {
    "CacheView": "h2o_gguf.view",
    "CancelToken": "h2o_gguf.cancel",
    "Engine": "h2o_gguf.engine",
    "H2OLlama": "h2o_gguf.llama",
    "KVReport": "h2o_gguf.report",
}

__all__ = ["CacheView", "CancelToken", "Engine", "H2OLlama", "KVReport", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
