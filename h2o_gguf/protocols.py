"""Words the engine and its callers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["UNBOUNDED", "Logits", "Progress", "Sampler"]

UNBOUNDED = 2**31 - 1  # llama.cpp counts positions in int32

Logits: TypeAlias = NDArray[np.float32]  # [n_vocab], or [n_rows, n_vocab]
Progress = Callable[[int, int], None]  # tokens done, tokens in all


class Sampler(Protocol):
    """Chooses the next token."""

    def sample(self, logits: Logits, tokens: NDArray[np.intc]) -> int | None:
        """A token, from logits float32[n_vocab] and the tokens so far, int32[n]; None if none is allowed."""
        ...

    def accept(self, token: int) -> None:
        """The token was chosen."""
        ...
