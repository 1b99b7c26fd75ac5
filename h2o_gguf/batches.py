"""Where tokens that are read are cut into batches."""

from __future__ import annotations

__all__ = ["batches"]


def batches(n: int, size: int, n_last: int = 0) -> list[tuple[int, int]]:
    """The batches of n tokens, at most `size` each, as half-open spans.

    n_last : of the last tokens, how many come in a batch of their own, as far as one holds them.
    """
    n_last = min(n, n_last, size)
    cuts = [*range(0, n - n_last, size), n - n_last] if n_last else [*range(0, n, size)]
    return list(zip(cuts, [*cuts[1:], n], strict=True))
