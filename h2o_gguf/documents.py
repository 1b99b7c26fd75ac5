"""Texts of any length, read a piece at a time."""

from __future__ import annotations

import codecs
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from h2o_gguf.errors import OptionError
from h2o_gguf.text import readable

__all__ = ["Document", "regular_size"]

CHUNK_BYTES = 1 << 16
PIECE_CHARS = 1 << 15
REPLACEMENT = "\ufffd"
DAMAGE = "\udfff"  # stands for REPLACEMENT while it is counted: no text has it, and a text may have the other
MARKS = (  # UTF-32's begins with UTF-16's
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
MARK_DAMAGE = "h2o_gguf.mark_damage"
codecs.register_error(MARK_DAMAGE, lambda error: (DAMAGE, error.end))  # type: ignore[attr-defined]


class Document:
    """A text file or stream.  UTF-8, or UTF-16 or UTF-32 with a byte order mark; \\r\\n reads as \\n.

    name : of the file.  n_bytes : its size, None for a stream.  n_bytes_read : so far.
    n_replaced : byte sequences that are no text and were read as U+FFFD, so far.
    """

    def __init__(self, file: BinaryIO, name: str, n_bytes: int | None, *, keeps_open: bool = False) -> None:
        """keeps_open : `close` leaves the file alone."""
        self._file = file
        self._keeps_open = keeps_open
        self.name = name
        self.n_bytes = n_bytes
        self.n_bytes_read = 0
        self.n_replaced = 0

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Document:
        """Open a file.  Raises: OptionError, it cannot be read."""
        try:
            if not os.fspath(path):
                raise FileNotFoundError(2, "the name is empty")
            if os.path.isdir(path):
                raise IsADirectoryError(21, "is a folder")
            file = Path(path).open("rb")  # noqa: SIM115  # closed by close()
            name = readable(os.path.basename(path))
            return cls(file, name, regular_size(file))
        except OSError as error:
            reason = error.strerror or str(error)
            raise OptionError(
                f"cannot read {os.fspath(path)!r}: {reason[:1].lower()}{reason[1:]}", "file"
            ) from error

    def close(self) -> None:
        """Close the file; may be called twice."""
        if not self._keeps_open:
            self._file.close()

    def __enter__(self) -> Document:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def text(self) -> str:
        """The whole text.  Raises: OptionError, it is not text."""
        return "".join(self.pieces())

    def pieces(self, n_chars: int = PIECE_CHARS) -> Iterator[str]:
        """Yield the text in pieces of about n_chars characters, cut where tokens begin.

        Raises: OptionError, it is not text.
        """
        held = ""
        for text in self._decoded():
            held += text
            while len(held) >= n_chars:
                cut = _cut(held, n_chars)
                yield held[:cut]
                held = held[cut:]
        if held:
            yield held

    def _decoded(self) -> Iterator[str]:
        chunk = self._read()
        encoding = "utf-8"
        for mark, name in MARKS:
            if chunk.startswith(mark):
                chunk, encoding = chunk[len(mark) :], name
                break
        if encoding == "utf-8" and b"\0" in chunk:
            raise OptionError(
                f"{self.name!r} is not text: it has zero bytes; convert it to plain text first", "file"
            )
        decoder = codecs.getincrementaldecoder(encoding)(MARK_DAMAGE)
        newlines = io.IncrementalNewlineDecoder(decoder, translate=True)
        while chunk:
            yield self._replaced(newlines.decode(chunk))
            chunk = self._read()
        yield self._replaced(newlines.decode(b"", final=True))

    def _replaced(self, text: str) -> str:
        """The text with U+FFFD where it was no text, counted."""
        self.n_replaced += text.count(DAMAGE)
        return text.replace(DAMAGE, REPLACEMENT)

    def _read(self) -> bytes:
        chunk = self._file.read(CHUNK_BYTES)
        self.n_bytes_read += len(chunk)
        return chunk


def regular_size(file: BinaryIO) -> int | None:
    """Bytes of a regular file; None for a pipe or a device.  Raises: OSError, ValueError: it is no file."""
    info = os.fstat(file.fileno())
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def _cut(text: str, n: int) -> int:
    """Where to cut, at most n characters in: tokens of the two parts are those of the whole.

    Between two lines without a blank one, since tokenizers join runs of white space; else before a single
    space; else at n.
    """
    lowest = n // 2
    at = n
    while (at := text.rfind("\n", lowest, at)) > 0:
        if at + 1 < len(text) and not text[at - 1].isspace() and not text[at + 1].isspace():
            return at + 1
    at = n
    while (at := text.rfind(" ", lowest, at)) > 0:
        if at + 1 < len(text) and not text[at - 1].isspace() and not text[at + 1].isspace():
            return at
    return n
