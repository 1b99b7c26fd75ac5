"""Ctrl-C asks the running call to stop; a second one leaves at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from h2o_gguf.cancel import CancelToken

__all__ = ["cancel_on_interrupt"]


@contextmanager
def cancel_on_interrupt() -> Iterator[CancelToken]:
    """A token that Ctrl-C cancels while the with-block runs."""
    token = CancelToken()
    if threading.current_thread() is not threading.main_thread():
        yield token
        return

    def on_interrupt(_signal: int, _frame: Any) -> None:
        if token.cancelled:
            raise KeyboardInterrupt
        token.cancel()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield token
    finally:
        signal.signal(signal.SIGINT, before)
