"""Where tokens that are read are cut into batches."""

from __future__ import annotations

from itertools import pairwise

__all__ = ["batches"]


def batches(n: int, size: int, n_last: int = 0) -> list[tuple[int, int]]:
    """The batches of n tokens, at most `size` each, as half-open spans.

    n_last : of the last tokens, how many come in batches of their own.
    """
    first = n - min(n, n_last)
    cuts = [*range(0, first, size), *range(first, n, size), n]
    return list(pairwise(cuts))
