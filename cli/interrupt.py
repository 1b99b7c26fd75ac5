"""The keyboard while a call runs: Ctrl-C asks it to stop, a second one leaves at once, nothing is echoed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from h2o_gguf.cancel import CancelToken
from h2o_gguf.cli.leaving import handling_interrupts, hearing_interrupts

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

__all__ = ["cancel_on_interrupt", "no_echo"]


@contextmanager
def cancel_on_interrupt() -> Iterator[CancelToken]:
    """A token that Ctrl-C cancels while the with-block runs."""
    token = CancelToken()
    is_second = False

    def on_interrupt(_signal: int, _frame: Any) -> None:
        nonlocal is_second
        if is_second:
            raise KeyboardInterrupt
        is_second = True
        token.cancel()

    # Heard in a thread too: native code reads the token while a long batch keeps the handler waiting.
    with hearing_interrupts(token.cancel), handling_interrupts(on_interrupt):
        yield token


@contextmanager
def no_echo() -> Iterator[None]:
    """Keep what is typed meanwhile, ^C included, from appearing inside the answer.

    The terminal leaves its keys as they are for whoever reads next: Enter is not the same as Ctrl-J.
    """
    if termios is None or not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    quiet = [*before]
    quiet[0] &= ~termios.ICRNL
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):
            termios.tcsetattr(terminal, termios.TCSANOW, before)
