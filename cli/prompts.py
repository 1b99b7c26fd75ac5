"""Where a prompt comes from: arguments, files, stdin."""

from __future__ import annotations

import sys
from typing import BinaryIO, cast

from h2o_gguf.cli.leaving import raising_at_interrupt
from h2o_gguf.cli.render import notice
from h2o_gguf.documents import Document, regular_size
from h2o_gguf.errors import OptionError

__all__ = ["gather_prompt", "open_document", "read_text", "warn_replaced"]

STDIN = "-"


def gather_prompt(argument: str | None, option: str | None, file: str | None) -> str:
    """Piped stdin, then the file, then the prompt, a blank line between them.

    Raises: OptionError, there is none of them, or two prompts.
    """
    if argument is not None and option is not None:
        raise OptionError("the prompt is given twice, as an argument and with -p: give one", "prompt")
    prompt = argument if option is None else option
    reads_stdin = not sys.stdin.isatty() or STDIN in (argument, file)
    parts: list[str] = []
    if reads_stdin:
        parts.append(read_text(STDIN))
    if file is not None and file != STDIN:
        parts.append(read_text(file))
    if prompt is not None and not (prompt == STDIN and option is None):
        parts.append(prompt)
    parts = [part for part in parts if part.strip()]
    if not parts:
        raise OptionError(
            "there is no prompt: give one as an argument, with -p, with -f FILE or on stdin", "prompt"
        )
    if len(parts) == 1:
        return parts[0]
    return "\n\n".join([*(part.rstrip("\n") for part in parts[:-1]), parts[-1]])


def read_text(name: str) -> str:
    """The text of a file, or of stdin for -.  Raises: OptionError, it cannot be read or is no text."""
    with open_document(name) as document:
        text = document.text()
        warn_replaced(document)
        return text


def open_document(name: str) -> Document:
    """Open a file, or stdin for -.  Raises: OptionError, it cannot be read."""
    if name != STDIN:
        return Document.open(name)
    file = cast(BinaryIO, sys.stdin.buffer)
    try:
        size = regular_size(file)
    except (OSError, ValueError):
        size = None
    return Document(cast(BinaryIO, _Stdin(file)), "stdin", size, keeps_open=True)


class _Stdin:
    """stdin for a document: Ctrl-C is heard while it is waited for, and one Ctrl-D ends it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._is_over = False

    def read(self, n: int) -> bytes:
        if self._is_over:  # a terminal would begin anew
            return b""
        with raising_at_interrupt():
            data = self._file.read(n)
        self._is_over = len(data) < n
        return data


def warn_replaced(document: Document) -> None:
    """Say so when parts of a text were no UTF-8."""
    if document.n_replaced:
        notice(f"{document.name} is not all UTF-8: {document.n_replaced:,} places were read as U+FFFD")
