"""Bytes to text: those of tokens, without ever showing half a character, and those of file names."""

from __future__ import annotations

import codecs
import os

__all__ = ["Utf8Stream", "readable"]


def readable(path: str | os.PathLike[str]) -> str:
    """Return a path as text that can be written anywhere, with U+FFFD for bytes that are no UTF-8."""
    return os.fsencode(path).decode("utf-8", "replace")


class Utf8Stream:
    """Turns pieces of UTF-8 into text; an incomplete character is held back until it is complete.

    The joined results equal the text of the joined bytes. Bytes that can never become a character turn into
    U+FFFD; a character still incomplete at the end is dropped.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str:
        """Return the text that `piece` completes."""
        return self._decoder.decode(piece)

    @property
    def held(self) -> bytes:
        """The bytes held back."""
        return self._decoder.getstate()[0]
