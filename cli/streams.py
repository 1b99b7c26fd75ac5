"""The standard streams as a program may find them: closed, full, or in another encoding."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable

import typer

from h2o_gguf.cli.render import complain
from h2o_gguf.errors import NO_FIT, USAGE

__all__ = ["prepare_streams", "well_formed", "well_formed_option"]


def prepare_streams() -> None:
    """Make of the standard streams what the rest of a command takes for granted.

    Closed ones lead nowhere, and what an encoding lacks comes out as a question mark. Where stdout cannot be
    written the command ends, quietly if its reader has gone; where stderr cannot, it goes on without.
    """
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # see well_formed
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _Stream(sys.stdout, _end)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _Stream(sys.stderr, lambda error: None)


class _Stream(io.TextIOWrapper):
    """A stream that, once it cannot be written, leads nowhere.

    on_error : is told why, and returns what every try to write raises from then on.
    """

    def __init__(self, stream: io.TextIOWrapper, on_error: Callable[[OSError], Exception | None]) -> None:
        super().__init__(
            stream.buffer, stream.encoding, "replace",
            line_buffering=stream.line_buffering, write_through=stream.write_through,
        )  # fmt: skip
        self._original = stream  # which closes the buffer when it goes
        self._on_error = on_error
        self._problem: Exception | None = None

    def write(self, text: str) -> int:
        if self._problem is not None:
            raise self._problem
        try:
            return super().write(text)
        except OSError as error:
            self._forget(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._forget(error)

    def _forget(self, error: OSError) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        self._problem = self._on_error(error)
        if self._problem is not None:
            raise self._problem from None


def _end(error: OSError) -> typer.Exit:
    """What cannot be said need not be computed."""
    if isinstance(error, BrokenPipeError):
        return typer.Exit(0)
    complain(f"the answer cannot be written: {error.strerror or error}")
    return typer.Exit(NO_FIT if error.errno == errno.ENOSPC else USAGE)


def well_formed(text: str) -> str:
    """The text of an argument or a line, whose bytes that are no UTF-8 become U+FFFD.

    Python keeps them as lone surrogates, since they may be the name of a file.
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def well_formed_option(text: str | None) -> str | None:
    """The same for the value of an option that may be missing."""
    return None if text is None else well_formed(text)
