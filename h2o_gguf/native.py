"""The one place that imports `llama_cpp`, which is untyped.

`C` has llama.cpp's C functions, `high` the classes of llama-cpp-python.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any

__all__ = ["C", "NativeLog", "high", "native_log"]

try:
    # Makes llama_cpp load our build of llama.cpp, or says why it cannot.
    importlib.import_module("h2o_gguf.bindings.library").lib()
except ImportError:
    if "H2O_GGUF_STOCK" not in os.environ:
        raise

high: Any = importlib.import_module("llama_cpp")
C: Any = importlib.import_module("llama_cpp.llama_cpp")

logger = logging.getLogger("h2o_gguf.native")
logging.getLogger("h2o_gguf").addHandler(logging.NullHandler())  # quiet unless the program asks
LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
GGML_WARN, GGML_ERROR, GGML_CONTINUED = 3, 4, 5


class NativeLog:
    """Lines llama.cpp logged during a with-block, for the reason in an error."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def reason(self, otherwise: str) -> str:
        """The first error that was logged, without the name of the C++ function."""
        for line in self.errors or self.warnings:
            head, colon, tail = line.partition(": ")
            text = tail if colon and head.replace("_", "").replace("::", "").isalnum() else line
            text = text.removeprefix("error loading model: ")
            if text:
                return text
        return otherwise


@contextlib.contextmanager
def native_log(is_verbose: bool = False) -> Iterator[NativeLog]:
    """Collect what llama.cpp logs; lines go to `logging`, and to stderr only when is_verbose."""
    log = NativeLog()
    last = [logging.DEBUG]

    @C.llama_log_callback  # type: ignore[untyped-decorator]
    def on_line(level: int, text: bytes | None, _user_data: int | None) -> None:
        line = (text or b"").decode("utf-8", "replace").rstrip("\n")
        if level != GGML_CONTINUED:
            last[0] = LEVELS.get(level, logging.DEBUG)
        if level == GGML_ERROR and line:
            log.errors.append(line)
        elif level == GGML_WARN and line:
            log.warnings.append(line)
        if line:
            logger.log(logging.WARNING if is_verbose else last[0], "%s", line)

    before, user_data = C.llama_log_callback(), ctypes.c_void_p()
    C.llama_log_get(ctypes.byref(before), ctypes.byref(user_data))
    C.llama_log_set(on_line, ctypes.c_void_p(0))
    try:
        yield log
    finally:
        C.llama_log_set(before, user_data)
