"""Ctrl-C while there is nothing to keep: the process leaves at once, quietly, with 130.

That is so while modules are imported, a model is loaded, and the interpreter ends. Imported first of all, so
this module imports little.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from h2o_gguf.errors import INTERRUPTED

__all__ = [
    "handling_interrupts",
    "hearing_interrupts",
    "leave",
    "leave_at_interrupt",
    "leaving_at_interrupt",
    "raising_at_interrupt",
]


def leave() -> NoReturn:
    """Leave with 130 and what was said so far.

    Not by an exception: CPython ends with a signal, and not with the code, where a KeyboardInterrupt has gone
    through exec() of a text, as the making of a dataclass is.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(INTERRUPTED)


def leave_at_interrupt() -> None:
    """From now on Ctrl-C ends the process wherever Python code runs."""
    signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(_signal: int, _frame: object) -> None:
    os._exit(INTERRUPTED)


@contextmanager
def raising_at_interrupt() -> Iterator[None]:
    """In the with-block Ctrl-C raises KeyboardInterrupt."""
    with handling_interrupts(signal.default_int_handler):
        yield


@contextmanager
def leaving_at_interrupt() -> Iterator[None]:
    """In the with-block Ctrl-C ends the process, even while native code runs and no handler can."""
    with hearing_interrupts(lambda: os._exit(INTERRUPTED)), handling_interrupts(_on_interrupt):
        yield


@contextmanager
def hearing_interrupts(tell: Callable[[], None]) -> Iterator[None]:
    """In the with-block Ctrl-C calls tell in a thread of its own, at once, even while native code runs."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)

    def listen() -> None:
        while signals := os.read(heard, 1):
            if signals[0] == signal.SIGINT:
                tell()
        os.close(heard)

    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    threading.Thread(target=listen, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(told)


@contextmanager
def handling_interrupts(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """In the with-block this handles Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
