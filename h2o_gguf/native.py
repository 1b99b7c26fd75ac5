"""The one place that imports `llama_cpp`, which is untyped, and that hears what native code logs.

`C` has llama.cpp's C functions, `high` the classes of llama-cpp-python.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
from collections.abc import Iterator
from typing import Any

from h2o_gguf.native_log import GGML_CONTINUED, NativeLog

__all__ = ["C", "high", "native_log"]

# Makes llama_cpp load our build of llama.cpp, or says why it cannot.
importlib.import_module("h2o_gguf.bindings.library").lib()
high: Any = importlib.import_module("llama_cpp")
C: Any = importlib.import_module("llama_cpp.llama_cpp")

logger = logging.getLogger("h2o_gguf.native")
logging.getLogger("h2o_gguf").addHandler(logging.NullHandler())  # quiet unless the program asks
LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # of ggml_log_level

_listeners: list[NativeLog] = []
_last_level = logging.DEBUG


@contextlib.contextmanager
def native_log() -> Iterator[NativeLog]:
    """Collect what llama.cpp logs."""
    log = NativeLog()
    _listeners.append(log)
    try:
        yield log
    finally:
        _listeners.remove(log)


@C.llama_log_callback  # type: ignore[untyped-decorator]
def _on_line(level: int, text: bytes | None, user_data: int | None) -> None:
    global _last_level
    if logging.NOTSET < high._logger.logger.level <= logging.DEBUG:  # someone asked for verbose=True
        high._logger.llama_log_callback(level, text, user_data)
    if level != GGML_CONTINUED:
        _last_level = LEVELS.get(level, logging.DEBUG)
    line = (text or b"").decode("utf-8", "replace").rstrip("\n")
    if not line:
        return
    for log in list(_listeners):
        log.add(level, line)
    logger.log(_last_level, "%s", line)


# llama-cpp-python prints warnings of a quiet model to stderr; they belong into `logging`.
C.llama_log_set(_on_line, ctypes.c_void_p(0))
