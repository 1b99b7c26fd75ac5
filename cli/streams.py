"""The standard streams as a program may find them: closed, full, or in another encoding."""

from __future__ import annotations

import os
import sys

__all__ = ["prepare_streams", "well_formed"]


def prepare_streams() -> None:
    """Open closed standard streams on nothing, and let what an encoding lacks come out as a question mark."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def well_formed(text: str) -> str:
    """The text of a command line, whose bytes that are no UTF-8 become U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
