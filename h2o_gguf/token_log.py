"""The tokens of a sequence, as a list and as an array that grows with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["TokenLog"]


class TokenLog:
    """A list of tokens that is shortened and extended at its end only.

    tokens : the list; change it through the methods.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._array = np.empty(256, np.intc)
        self._n = 0  # tokens the array has already

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self.tokens.extend(tokens)

    def shorten(self, n: int) -> None:
        """Keep the first n."""
        self._n = min(self._n, n)
        del self.tokens[n:]

    def array(self) -> NDArray[np.intc]:
        """The tokens as int32[n], read-only; valid until the next change."""
        n = len(self.tokens)
        if n > self._array.size:
            grown = np.empty(max(n, 2 * self._array.size), np.intc)
            grown[: self._n] = self._array[: self._n]
            self._array = grown
        self._array[self._n : n] = self.tokens[self._n :]
        self._n = n
        view = self._array[:n]
        view.flags.writeable = False
        return view
