"""The one place that imports `llama_cpp`, which is untyped, and that hears what native code logs.

`C` has llama.cpp's C functions, `high` the classes of llama-cpp-python.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import importlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from h2o_gguf.native_log import GGML_CONTINUED, NativeLog

__all__ = ["C", "high", "native_log", "on_abort"]

# Makes llama_cpp load our build of llama.cpp, or says why it cannot.
importlib.import_module("h2o_gguf.bindings.library").lib()
high: Any = importlib.import_module("llama_cpp")
C: Any = importlib.import_module("llama_cpp.llama_cpp")

logger = logging.getLogger("h2o_gguf.native")
logging.getLogger("h2o_gguf").addHandler(logging.NullHandler())  # quiet unless the program asks
LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}  # of ggml_log_level
# No errors: the caller asked for it.
CANCELLED = ("compute_async failed with error 1", "compute status: 1", "failed to decode, ret = 2")

AGAIN_S = 0.01  # until a Ctrl-C that came in a log line is pressed again

_ABORT_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
_abort_callback: Any = None  # lives as long as native code may call it


def on_abort(tell: Callable[[str], None]) -> None:
    """Before native code ends the process, call `tell` with the reason, in whatever thread that is."""
    global _abort_callback
    _abort_callback = _ABORT_CALLBACK(lambda text: tell(text.decode("utf-8", "replace")))
    with contextlib.suppress(AttributeError):  # Windows finds only what libllama itself exports
        C._lib.ggml_set_abort_callback(_abort_callback)


_listeners: list[NativeLog] = []
_last_level = logging.DEBUG


@contextlib.contextmanager
def native_log() -> Iterator[NativeLog]:
    """Collect what llama.cpp logs, and hold Ctrl-C back until the with-block ends.

    llama.cpp calls Python back for each line, and what a signal handler raised in there would be lost.
    """
    log = NativeLog()
    _listeners.append(log)
    before = signal.getsignal(signal.SIGINT)
    holds = callable(before) and threading.current_thread() is threading.main_thread()

    def hold(_signal: int, _frame: Any) -> None:
        log.is_interrupted = True

    if holds:
        signal.signal(signal.SIGINT, hold)
    try:
        yield log
    finally:
        _listeners.remove(log)
        if holds:
            signal.signal(signal.SIGINT, before)
            if log.is_interrupted:
                signal.raise_signal(signal.SIGINT)


@C.llama_log_callback  # type: ignore[untyped-decorator]
def _on_line(level: int, text: bytes | None, user_data: int | None) -> None:
    try:
        _note_line(level, text, user_data)
    except KeyboardInterrupt:  # nothing passes through native code: it is pressed again behind it
        threading.Timer(AGAIN_S, _thread.interrupt_main).start()


def _note_line(level: int, text: bytes | None, user_data: int | None) -> None:
    global _last_level
    if logging.NOTSET < high._logger.logger.level <= logging.DEBUG:  # someone asked for verbose=True
        high._logger.llama_log_callback(level, text, user_data)
    line = (text or b"").decode("utf-8", "replace").rstrip("\n")
    if level != GGML_CONTINUED:
        _last_level = logging.DEBUG if line.endswith(CANCELLED) else LEVELS.get(level, logging.DEBUG)
    if not line:
        return
    for log in list(_listeners):
        log.add(level, line)
    logger.log(_last_level, "%s", line)


# llama-cpp-python prints warnings of a quiet model to stderr; they belong into `logging`.
C.llama_log_set(_on_line, ctypes.c_void_p(0))
