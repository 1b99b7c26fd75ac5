"""Bytes of tokens to text, without ever showing half a character."""

from __future__ import annotations

import codecs

__all__ = ["Utf8Stream"]


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
