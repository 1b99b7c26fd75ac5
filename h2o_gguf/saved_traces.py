"""Traces as a session holds them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["SavedTraces", "check_traces", "pack", "unpack"]


class Header(NamedTuple):
    """Of one group: its layers, and how its bytes are to be read."""

    layers: list[int]
    n_seen: int
    shape: list[int]  # of the numbers


@dataclass(frozen=True, eq=False)
class SavedTraces:
    """The traces of the layers that share a cache.

    layers : of the model. n_seen : queries before this position are in the numbers.
    pos : int32[n_layer, n_head_kv, n], of the entries held, -1 for none.
    numbers : float32[n_trace, n_layer, n_head_kv, n], theirs.

    Raises: ValueError, the shapes do not belong together, or a number is not finite.
    """

    layers: tuple[int, ...]
    n_seen: int
    pos: NDArray[np.int32]
    numbers: NDArray[np.float32]

    def __post_init__(self) -> None:
        is_whole = self.pos.ndim == 3 and self.pos.shape[0] == len(self.layers)
        if not is_whole or self.numbers.ndim != 4 or self.numbers.shape[1:] != self.pos.shape:
            raise ValueError(
                f"traces of {self.numbers.shape} for {self.pos.shape} entries of {len(self.layers)} layers"
            )
        if not np.isfinite(self.numbers).all():
            raise ValueError("traces that are no finite numbers")


def check_traces(
    groups: Sequence[SavedTraces], n_head_kv: Mapping[tuple[int, ...], int], n_past: int
) -> None:
    """Raise ValueError unless these can be the traces of a sequence of n_past tokens.

    n_head_kv : of the layers that share a cache, for each such group.
    """
    if len({group.layers for group in groups}) < len(groups):
        raise ValueError("traces that have layers twice")
    for group in groups:
        if group.layers not in n_head_kv:
            raise ValueError(f"traces of layers {group.layers}, which share no cache")
        if group.pos.shape[1] != n_head_kv[group.layers]:
            raise ValueError(f"traces of {group.pos.shape[1]} heads where {n_head_kv[group.layers]} are")
        if not 0 <= group.n_seen <= n_past:
            raise ValueError(f"traces of {group.n_seen} queries for {n_past} tokens")
        if group.pos.size and not -1 <= group.pos.min() <= group.pos.max() < n_past:
            raise ValueError(
                f"traces at positions {group.pos.min()} to {group.pos.max()} for {n_past} tokens"
            )
        pos = np.sort(group.pos, axis=-1)
        if ((pos[..., 1:] == pos[..., :-1]) & (pos[..., 1:] >= 0)).any():
            raise ValueError("traces that have a position twice in one head")


def pack(groups: Sequence[SavedTraces]) -> tuple[list[Header], bytes]:
    """The groups as plain headers and bytes."""
    headers = [Header(list(g.layers), g.n_seen, list(g.numbers.shape)) for g in groups]
    return headers, b"".join(
        g.pos.astype("<i4").tobytes() + g.numbers.astype("<f4").tobytes() for g in groups
    )


def unpack(headers: Sequence[Sequence[Any]], data: bytes | memoryview) -> tuple[SavedTraces, ...]:
    """What `pack` was given.  Raises: ValueError, TypeError, OverflowError: it is something else."""
    found, at = [], 0
    for layers, n_seen, shape in headers:
        n_trace, *of_pos = (int(n) for n in shape)
        n = math.prod(of_pos)
        if min(n_trace, *of_pos) < 0 or at + 4 * n * (1 + n_trace) > len(data):
            raise ValueError(f"traces of {shape} in {len(data) - at} bytes")
        pos = np.frombuffer(data, "<i4", n, at).astype(np.int32).reshape(of_pos)
        numbers = np.frombuffer(data, "<f4", n * n_trace, at + 4 * n).astype(np.float32)
        found.append(
            SavedTraces(tuple(map(int, layers)), int(n_seen), pos, numbers.reshape(n_trace, *of_pos))
        )
        at += 4 * n * (1 + n_trace)
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes behind the traces")
    return tuple(found)
