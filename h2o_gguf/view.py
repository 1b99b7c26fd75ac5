"""What a policy sees of a cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import PolicyError
from h2o_gguf.observation import Observation
from h2o_gguf.rows import PLAIN, Rows, taken

__all__ = ["CacheView"]

FLOAT32_BITS = 24  # weights below 2^-24 no longer change a float32 sum


@dataclass(frozen=True, eq=False)
class CacheView:
    """The cache at the moment room is needed.  Read-only; valid only during the call it is passed to.

    scores : float32[n_layer, n_head_kv, n_cells], decayed sum of the attention mass each entry has
        received; 0 when the policy asked for none.
    pos : int32[n_layer, n_head_kv, n_cells], position of the entry in the sequence, -1 empty.
    n_past : next position; every query before it has been counted.
    n_used : entries per KV head.
    decay : factor per token the scores were summed with, in [0, 1]; 1.0 is the plain sum.
    layer_ids : the model's layer of each row.
    pins : half-open spans of positions that are never victims.
    n_prompt : where the newest prompt ends; tokens from this position on were generated.
    observation : keys, values and recent queries, layer by layer; None where there is no cache to read.
    traces : float32[n_trace, n_layer, n_head_kv, n_cells], what the policy's observe() returned, carried
        along with the entries; 0 for new ones.
    n_unobserved : the newest tokens that observe() has not seen.
    recalled : bool[n_layer, n_head_kv, n_cells], entries that the last batch that recalled fetched back from
        the attic; None: there are none.
    rows : who works on rows of cells for it; numpy, or native code with the same answers.
    """

    scores: NDArray[np.float32]
    pos: NDArray[np.int32]
    n_past: int
    n_used: int
    decay: float = 1.0
    layer_ids: tuple[int, ...] = ()
    pins: tuple[tuple[int, int], ...] = ()
    observation: Observation | None = None
    traces: NDArray[np.float32] | None = None
    n_unobserved: int = 0
    n_prompt: int = 0
    recalled: NDArray[np.bool_] | None = None
    rows: Rows = PLAIN

    def __post_init__(self) -> None:
        if self.pos.ndim != 3 or self.scores.shape != self.pos.shape:
            raise ValueError(
                f"scores {self.scores.shape} and pos {self.pos.shape} "
                "must both be [n_layer, n_head_kv, n_cells]"
            )
        object.__setattr__(self, "scores", _read_only(self.scores, np.float32))
        object.__setattr__(self, "pos", _read_only(self.pos, np.int32))
        if not self.layer_ids:
            object.__setattr__(self, "layer_ids", tuple(range(self.pos.shape[0])))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(n_layer, n_head_kv, n_cells)."""
        n_layer, n_head_kv, n_cells = self.pos.shape
        return n_layer, n_head_kv, n_cells

    def pinned(self) -> NDArray[np.bool_]:
        """Which entries lie in a pinned span: bool[n_layer, n_head_kv, n_cells]."""
        return self._inside_pins(self.pos)

    def _inside_pins(self, pos: NDArray[np.int32]) -> NDArray[np.bool_]:
        inside = np.zeros(pos.shape, np.bool_)
        for start, end in self.pins:
            inside |= self.rows.within(pos, max(start, 0), max(end, 0))
        return inside

    def evictable(
        self, n_sink: int, n_recent: int, cells: NDArray[np.integer] | None = None
    ) -> NDArray[np.bool_]:
        """Which entries may be victims: bool[n_layer, n_head_kv, n_cells].

        Everything but the empty cells, positions below n_sink, the newest n_recent positions, the pinned
        spans, and what was recalled.
        cells : int[n_layer, n_head_kv, n], asks for these alone and in this order.
        """
        pos = self.pos if cells is None else taken(self.pos, cells)
        first_recent = self.n_past - max(int(n_recent), 0)  # a small integer of numpy's would overflow
        free = self.rows.within(pos, max(int(n_sink), 0), max(first_recent, 0))
        if self.pins:
            free &= ~self._inside_pins(pos)
        if self.recalled is not None:
            free &= ~(self.recalled if cells is None else taken(self.recalled, cells))
        return free

    @property
    def seen(self) -> Observation:
        """The observation.  Raises: PolicyError, there is none."""
        if self.observation is None:
            raise PolicyError("this view was made without keys, values and queries")
        return self.observation

    def attention(self, row: int) -> NDArray[np.float32]:
        """Attention of the recorded queries over the entries held now.

        float32[n_head_kv, n_group, n_observed, n_cells]; the softmax of each query runs over the entries at
        its position and before. row : a layer's index in this view.

        Raises: PolicyError, there is no observation.
        """
        seen = self.seen
        logits = seen.logits(row, seen.queries(row), seen.keys(row))
        pos = self.pos[row, :, None, None, :]
        hidden = (pos < 0) | (pos > seen.query_pos[:, None])
        logits = np.where(hidden, np.float32(-np.inf), logits)
        peak = logits.max(-1, keepdims=True)
        sinks = seen.sinks(row)
        if sinks is not None:
            peak = np.maximum(peak, sinks[..., None, None])
        mass = np.exp(logits - np.where(np.isfinite(peak), peak, 0))
        total = mass.sum(-1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks[..., None, None] - peak)
        shares: NDArray[np.float32] = mass / np.maximum(total, np.finfo(np.float32).tiny)
        return shares

    def queries_seen(self) -> NDArray[np.float32]:
        """How many queries could see each entry, faded like scores: float32[n_layer, n_head_kv, n_cells].

        An entry at position p was seen by the queries at p, ..., n_past - 1, the newest with weight 1:
        1 + decay + ... + decay^(age - 1) = (1 - decay^age) / (1 - decay) with age = n_past - p.
        At least 1, also in empty cells. A query counts once, however many query heads share the KV head.
        """
        if self.decay == 1.0:
            return (self.n_past - self.pos).astype(np.float32)
        seen = np.ones(self.pos.shape, np.float32)
        if self.decay == 0.0:
            return seen
        sums = _sums(self.decay, self.n_past)
        for pos, seen_of in zip(self.pos, seen, strict=True):  # by layer: take needs room for wide indices
            sums.take(self.n_past - pos, mode="clip", out=seen_of)
        return seen

    def rates(self) -> NDArray[np.float32]:
        """Attention each entry received of a query that could see it: scores / queries_seen()."""
        if 0.0 < self.decay < 1.0:
            return self.rows.rates(self.scores, self.pos, self.n_past, _sums(self.decay, self.n_past))
        return np.divide(self.scores, self.queries_seen())


def _sums(decay: float, n_past: int) -> NDArray[np.float32]:
    """Return how many queries saw an entry of each age, faded: to n_past, or until it no longer grows."""
    n_ages = math.ceil(FLOAT32_BITS * math.log(2) / -math.log(decay))
    return _sums_until(decay, min(n_ages, 1 << max(1, n_past).bit_length()))


@lru_cache(maxsize=4)
def _sums_until(decay: float, n_ages: int) -> NDArray[np.float32]:
    sums = (-np.expm1(np.arange(n_ages + 1) * math.log(decay)) / (1.0 - decay)).astype(np.float32)
    return _read_only(sums, np.float32)


def _read_only(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    view: NDArray[Any] = np.asarray(array, dtype).view()
    view.setflags(write=False)
    return view
