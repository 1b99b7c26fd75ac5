"""Synthetic caches: a view with keys, values and queries drawn at random, for tests without a model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.observation import Rotation
from h2o_gguf.view import CacheView


@dataclass(frozen=True, eq=False, repr=False)
class Drawn:
    """An Observation made of arrays.  float64, so that results do not depend on the order of sums.

    k, v : [n_layer, n_head_kv, n_cells, head_dim]. q : [n_layer, n_head_kv, n_group, n_query, head_dim].
    """

    query_pos: NDArray[np.int32]
    k: NDArray[Any]
    v: NDArray[Any]
    q: NDArray[Any]
    scale: float
    rotates: Rotation | None = None
    sink_logits: NDArray[Any] | None = None

    def keys(self, row: int, cells: Any = None) -> NDArray[Any]:
        return np.asarray(self.k[row] if cells is None else self.k[row][:, cells])

    def values(self, row: int, cells: Any = None) -> NDArray[Any]:
        return np.asarray(self.v[row] if cells is None else self.v[row][:, cells])

    def queries(self, row: int) -> NDArray[Any]:
        return self.q[row]

    def logits(self, row: int, queries: NDArray[Any], keys: NDArray[Any]) -> NDArray[Any]:
        return self.scale * queries @ keys[:, None].swapaxes(-1, -2)

    def sinks(self, row: int) -> NDArray[Any] | None:
        return None if self.sink_logits is None else self.sink_logits[row]

    def rotation(self, row: int) -> Rotation | None:
        return self.rotates

    def moved(self, order: NDArray[Any]) -> Drawn:
        """The same with the entries in other cells."""
        return replace(self, k=self.k[:, :, order], v=self.v[:, :, order])


def half_rotation(head_dim: int, base: float = 100.0) -> Rotation:
    """RoPE on pairs half a head apart; the last pair of elements is not rotated."""
    n_pair = head_dim // 2 - 1
    return Rotation(
        np.arange(n_pair), np.arange(n_pair) + head_dim // 2, base ** (-np.arange(n_pair) / n_pair)
    )


def drawn(
    pos: NDArray[np.int32],
    n_past: int,
    n_query: int = 8,
    n_group: int = 2,
    head_dim: int = 8,
    spread: float = 1.0,
    seed: int = 0,
    rotates: bool = True,
) -> Drawn:
    """Random tensors for a cache that holds these positions; -1 and 0 for queries before the first token."""
    rng = np.random.default_rng(seed)
    query_pos = np.arange(n_past - n_query, n_past, dtype=np.int32).clip(-1)
    shape = (*pos.shape, head_dim)
    return Drawn(
        query_pos=query_pos,
        k=rng.normal(0.3, spread, shape),
        v=rng.normal(0.0, 1.0, shape),
        q=rng.normal(0.2, spread, (*pos.shape[:2], n_group, n_query, head_dim)) * (query_pos >= 0)[:, None],
        scale=head_dim**-0.5,
        rotates=half_rotation(head_dim) if rotates else None,
    )


def view_of(
    n_layer: int = 2,
    n_head_kv: int = 2,
    n_cells: int = 30,
    n_used: int = 24,
    n_past: int = 40,
    seed: int = 0,
    same_pos: bool = False,
    **knobs: Any,
) -> CacheView:
    """A view of random entries in random cells, the newest among them, with an observation."""
    rng = np.random.default_rng(seed)
    pos = np.full((n_layer, n_head_kv, n_cells), -1, np.int32)
    for il, ih in np.ndindex(n_layer, n_head_kv):
        pos[il, ih, rng.permutation(n_cells)[:n_used]] = rng.permutation(n_past)[:n_used]
    if same_pos:
        pos[:] = pos[:1, :1]
    n_trace_view = knobs.pop("n_unobserved", n_past)
    return CacheView(
        np.zeros(pos.shape, np.float32),
        pos,
        n_past,
        n_used,
        observation=drawn(pos, n_past, seed=seed + 1, **knobs),
        n_unobserved=n_trace_view,
    )


def plain_attention(view: CacheView, row: int) -> NDArray[np.float64]:
    """Attention of the recorded queries, one number at a time: [n_head_kv, n_group, n_query, n_cells]."""
    seen: Any = view.observation
    q, k = seen.q[row], seen.k[row]
    n_head_kv, n_group, n_query, _ = q.shape
    n_cells = view.shape[-1]
    out = np.zeros((n_head_kv, n_group, n_query, n_cells))
    for h, g, t in np.ndindex(n_head_kv, n_group, n_query):
        mass = {
            c: np.exp(seen.scale * float(q[h, g, t] @ k[h, c]))
            for c in range(n_cells)
            if 0 <= view.pos[row, h, c] <= seen.query_pos[t]
        }
        total = sum(mass.values())
        if seen.sink_logits is not None:
            total += np.exp(seen.sink_logits[row, h, g])
        for c, m in mass.items():
            out[h, g, t, c] = m / total
    return out


def lowest(view: CacheView, scores: Any, il: int, ih: int, n: int) -> list[int]:
    """The cells of the n lowest scores of a head, oldest first among equals."""
    held = [c for c in range(view.shape[-1]) if view.pos[il, ih, c] >= 0]
    return sorted(held, key=lambda c: (np.float32(scores[c]), view.pos[il, ih, c]))[:n]
