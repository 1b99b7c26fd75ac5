"""Stopping a call from another thread."""

from __future__ import annotations

import ctypes

__all__ = ["CancelToken"]


class CancelToken:
    """Asks a running call to stop; safe to use from any thread and from a signal handler.

    The flag lives in native memory, so that the compute threads read it without taking the GIL.
    A token stays cancelled until `clear`.
    """

    def __init__(self) -> None:
        # Two bytes, so that the flag is a C string: "" while running, "\x01" once cancelled.
        self._flag = (ctypes.c_char * 2)(b"\0", b"\0")

    def cancel(self) -> None:
        """Ask the call that holds this token to stop."""
        self._flag[0] = b"\1"

    def clear(self) -> None:
        """Make the token usable for another call."""
        self._flag[0] = b"\0"

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return bool(self._flag[0] != b"\0")

    @property
    def address(self) -> int:
        """Address of the flag, a NUL-terminated string, empty while running; valid while the token lives."""
        return ctypes.addressof(self._flag)

    def __repr__(self) -> str:
        return f"CancelToken(cancelled={self.cancelled})"
