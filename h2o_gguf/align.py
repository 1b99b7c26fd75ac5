"""Matching a new prompt with the tokens in the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Alignment", "align"]


@dataclass(frozen=True)
class Alignment:
    """Which tokens of the cache say the same as a prefix of the prompt.

    n_cached : that many cached tokens stay.  n_prompt : they stand for that many tokens of the prompt.
    borders : pairs (index in prompt, index in cache), the ends of the runs that are cut in different ways.
    """

    n_cached: int
    n_prompt: int
    borders: tuple[tuple[int, int], ...] = ()

    def position(self, index: int, *, end: bool = False) -> int:
        """The cache position of prompt token `index`; rounded outwards inside a piece cut in another way.

        end : whether the index ends a span (rounded up) or begins one (rounded down).
        """
        below = above = (0, 0)
        for border in self.borders:
            if border[0] <= index:
                below = border
            if border[0] >= index:
                above = border
                break
        else:
            return below[1] + index - below[0]
        if above[0] == index:
            return above[1]
        gap = (above[0] - below[0], above[1] - below[1])
        if gap[0] == gap[1]:
            return below[1] + index - below[0]
        return above[1] if end else below[1]


def align(
    cached: Sequence[int],
    prompt: Sequence[int],
    piece: Callable[[int], bytes | None],
) -> Alignment:
    """Return how much of the cache the prompt can keep.

    Tokens match when they are equal, or when a run of cached and a run of prompt tokens spell the same bytes:
    a reply that was generated as tokens comes back as text and may be cut into other tokens. The cached
    ones stay, since they are what the model saw.

    piece : the bytes of a text token; None for a control token, which matches nothing but itself.
    """
    i = j = 0  # aligned: cached[:i] and prompt[:j] spell the same
    borders: list[tuple[int, int]] = []
    while i < len(cached) and j < len(prompt):
        if cached[i] == prompt[j]:
            i += 1
            j += 1
            continue
        run = _equal_run(cached, i, prompt, j, piece)
        if run is None:
            break
        borders.append((j, i))
        i += run[0]
        j += run[1]
        borders.append((j, i))
    return Alignment(i, j, tuple(borders))


def _equal_run(
    cached: Sequence[int], i: int, prompt: Sequence[int], j: int, piece: Callable[[int], bytes | None]
) -> tuple[int, int] | None:
    """Lengths of the shortest runs from cached[i] and prompt[j] with the same bytes; None if they differ."""
    left = right = b""
    n_left = n_right = 0
    while True:
        if len(left) <= len(right):
            tokens, at, is_left = cached, i + n_left, True
        else:
            tokens, at, is_left = prompt, j + n_right, False
        more = piece(tokens[at]) if at < len(tokens) else None
        if not more:  # the end, a control token, or a token without text
            return None
        if is_left:
            left, n_left = left + more, n_left + 1
        else:
            right, n_right = right + more, n_right + 1
        short = min(len(left), len(right))
        if left[:short] != right[:short]:
            return None
        if len(left) == len(right):
            return n_left, n_right
