"""Traces as a session holds them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["SavedTraces", "pack", "unpack"]


@dataclass(frozen=True, eq=False)
class SavedTraces:
    """The traces of the layers that share a cache.

    layers : of the model. n_seen : queries before this position are in the numbers.
    pos : int32[n_layer, n_head_kv, n], of the entries held, -1 for none.
    numbers : float32[n_trace, n_layer, n_head_kv, n], theirs.

    Raises: ValueError, the shapes do not belong together.
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


def pack(groups: Sequence[SavedTraces]) -> bytes:
    """The groups as bytes."""
    out = io.BytesIO()
    arrays = {
        f"{name}{i}": np.asarray(value) for i, each in enumerate(groups) for name, value in vars(each).items()
    }
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def unpack(data: bytes) -> tuple[SavedTraces, ...]:
    """What `pack` was given.  Raises: ValueError, it is something else."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            n = len(file.files) // len(SavedTraces.__annotations__)
            return tuple(
                SavedTraces(
                    tuple(int(layer) for layer in file[f"layers{i}"]),
                    int(file[f"n_seen{i}"]),
                    file[f"pos{i}"].astype(np.int32),
                    file[f"numbers{i}"].astype(np.float32),
                )
                for i in range(n)
            )
    except (OSError, EOFError, LookupError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"traces cannot be read: {error}") from error
