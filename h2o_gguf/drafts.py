"""Speculative decoding: guessed tokens are evaluated together and kept while the model agrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Draft", "Guesses"]

Draft = Callable[[NDArray[np.intc]], Sequence[int]]  # the tokens so far -> what may follow


class Guesses:
    """Tokens that were evaluated ahead, with the logits after each; the books do not know of them yet."""

    def __init__(self, draft: Draft | None) -> None:
        self._draft = draft
        self._ahead: list[tuple[int, NDArray[np.float32]]] = []

    def ask(self, tokens: NDArray[np.intc], token: int, n_max: int, n_vocab: int) -> list[int]:
        """What may follow after `token`, at most n_max tokens."""
        if self._draft is None or n_max <= 0:
            return []
        guesses = [int(guess) for guess in self._draft(np.append(tokens, np.intc(token)))][:n_max]
        return guesses if all(0 <= guess < n_vocab for guess in guesses) else []

    def put(self, tokens: Sequence[int], rows: Sequence[NDArray[np.float32]]) -> None:
        """Remember tokens evaluated ahead and the logits after each."""
        self._ahead = list(zip(tokens, rows, strict=True))

    def clear(self) -> None:
        """Forget what was evaluated ahead."""
        self._ahead.clear()

    def take(self, token: int) -> NDArray[np.float32] | None:
        """The logits after `token` if it was guessed right; else forget all guesses."""
        if self._ahead and self._ahead[0][0] == token:
            return self._ahead.pop(0)[1]
        self._ahead.clear()
        return None
