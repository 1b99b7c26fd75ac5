"""An answer on stdout, as it comes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import closing

from h2o_gguf.cli.progress import LateBar

__all__ = ["Printer"]


class Printer:
    """Writes pieces of text to stdout and ends them with one newline.

    silent : only collect.  trims : leave out white space around the answer.  text : what was written.
    """

    def __init__(self, *, silent: bool = False, trims: bool = True) -> None:
        self._silent = silent
        self._trims = trims
        self._space = ""  # white space that is written once text follows it
        self.text = ""

    def write(self, piece: str) -> None:
        """Write one piece."""
        if self._trims:
            if not self.text:
                piece = piece.lstrip()
            kept = piece.rstrip()
            if kept:
                piece, self._space = self._space + kept, piece[len(kept) :]
            else:
                self._space, piece = self._space + piece, ""
        if not piece:
            return
        self.text += piece
        if not self._silent:
            sys.stdout.write(piece)
            sys.stdout.flush()

    def show(self, answer: Callable[[Callable[[int, int], None]], Generator[str, None, None]]) -> None:
        """Write an answer piece by piece, with a bar until the first one comes.

        answer : called with what takes the progress of the reading.
        """
        with LateBar("reading") as bar, closing(answer(bar.update)) as pieces:
            first = next(pieces, "")
            bar.close()
            try:
                self.write(first)
                for piece in pieces:
                    self.write(piece)
            finally:
                self.end()

    def end(self) -> None:
        """The answer is over."""
        if not self._silent and not self.text.endswith("\n"):
            sys.stdout.write("\n")
            sys.stdout.flush()
