"""What a policy may look at besides scores: keys, values, and the queries of the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Cells", "Floats", "Observation", "Rotation"]

Floats = NDArray[np.float32]
Cells = NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Rotation:
    """How a layer rotates queries and keys: pairs of elements, each by an angle per position.

    first, second : int[n_pair], the two elements of a pair, indices into head_dim.
    angle : float64[n_pair], radians per position. Elements in no pair are not rotated.
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    angle: NDArray[np.float64]

    def turned(self, vectors: Floats, by: int) -> Floats:
        """Return vectors rotated by that many positions: float32[..., head_dim]."""
        cos, sin = np.cos(by * self.angle), np.sin(by * self.angle)
        out = np.array(vectors, np.float32)
        x, y = vectors[..., self.first], vectors[..., self.second]
        out[..., self.first] = x * cos - y * sin
        out[..., self.second] = x * sin + y * cos
        return out


class Observation(Protocol):
    """Reads one cache, layer by layer; row is a layer's index in the view.  Valid as long as the view."""

    @property
    def query_pos(self) -> NDArray[np.int32]:
        """Positions of the recorded queries, oldest first, -1 where there are none yet: int32[n_observed]."""

    def keys(self, row: int, cells: Cells | None = None) -> Floats:
        """Keys as attention sees them: float32[n_head_kv, n, head_dim_k].

        cells : int[n], those to read; None: all n_cells.
        """

    def values(self, row: int, cells: Cells | None = None) -> Floats:
        """Values as attention sees them: float32[n_head_kv, n, head_dim_v].  cells : as for keys."""

    def queries(self, row: int) -> Floats:
        """Queries as attention sees them: float32[n_head_kv, n_group, n_observed, head_dim_k]."""

    def logits(self, row: int, queries: Floats, keys: Floats) -> NDArray[np.float32]:
        """Scaled and capped logits: float32[n_head_kv, n_group, n_query, n_cells].

        queries : float32[n_head_kv, n_group, n_query, head_dim_k].
        keys : float32[n_head_kv, n_cells, head_dim_k].
        """

    def sinks(self, row: int) -> Floats | None:
        """Logits of the heads' own sinks, which take part in the softmax: float32[n_head_kv, n_group]."""

    def rotation(self, row: int) -> Rotation | None:
        """How the layer rotates; None where it does not."""
