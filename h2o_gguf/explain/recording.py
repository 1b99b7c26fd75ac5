"""When each entry left the cache, noted while a sequence is read and written."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import OptionError
from h2o_gguf.policies import Cells, LayerBudgets
from h2o_gguf.view import CacheView

__all__ = ["HELD", "MAX_TOKENS", "NEVER_EVICTS", "Recording", "check_length", "why_not_recorded"]

HELD = int(np.iinfo(np.int32).max)
MAX_TOKENS = 1 << 17  # four bytes each in every layer and head, so there is an end to it
NEVER_EVICTS = (
    "nothing is ever evicted without a policy, so there is nothing to explain: "
    "evict with policy='h2o+', and give a kv_budget"
)
BY_LAYER = (
    "budgets by layer cannot be explained, since the replay has one cache for all layers: use one budget, "
    "with another policy than pyramidkv and without layer_budgets"
)


def check_length(n_tokens: int, hint: str) -> None:
    """Raise OptionError where a sequence is too long to be recorded."""
    if n_tokens > MAX_TOKENS:
        raise OptionError(
            f"the sequence has {n_tokens:,} tokens, and what left is recorded for {MAX_TOKENS:,} at most: "
            f"{hint}"
        )


class Recording:
    """Notes every eviction of an engine from now on, until `close`.

    An entry leaves once; a rollback takes back only what is still held, since the newest never leave. What a
    sequence before this one left behind is overwritten or corrected in `departures`.
    """

    def __init__(self, engine: Any) -> None:
        """engine : Engine.  Raises: OptionError, it never evicts, or has budgets by layer."""
        if reason := why_not_recorded(engine):
            raise OptionError(reason, "policy")
        self._engine = engine
        self._n_start = engine.n_past
        self._left = np.empty((engine.cache.n_layer, engine.cache.n_head_kv, 0), np.int32)
        engine.on_evict.append(self._note)

    def close(self) -> None:
        """Note nothing any more.  Calling twice is fine."""
        if self._note in self._engine.on_evict:
            self._engine.on_evict.remove(self._note)

    def departures(self) -> NDArray[np.int32]:
        """How many tokens had been read when each entry left: int32[n_layer, n_head_kv, n_past].

        HELD where it is still here. What left before the recording began counts as left at its beginning.

        Raises: OptionError, the sequence is longer than MAX_TOKENS.
        """
        n_past = self._engine.n_past
        check_length(n_past, "begin a new one")
        self._grow(n_past)
        left: NDArray[np.int32] = self._left[..., :n_past].copy()
        pos = self._engine.cache.pos
        row, head, cell = np.nonzero(pos >= 0)
        is_held = np.zeros(left.shape, np.bool_)
        is_held[row, head, pos[row, head, cell]] = True
        left[~is_held & (left == HELD)] = self._n_start
        left[is_held] = HELD
        return left

    def _note(self, view: CacheView, victims: Cells) -> None:
        if view.n_past > MAX_TOKENS:
            self._left = self._left[..., :0]
            return
        self._grow(view.n_past)
        pos = np.take_along_axis(view.pos, victims, axis=-1)
        np.put_along_axis(self._left, pos, view.n_past, axis=-1)

    def _grow(self, n: int) -> None:
        """Have room for n positions."""
        n_old = self._left.shape[-1]
        if n > n_old:
            grown = np.full((*self._left.shape[:-1], max(n, 2 * n_old)), HELD, np.int32)
            grown[..., :n_old] = self._left
            self._left = grown


def why_not_recorded(engine: Any) -> str:
    """Why what leaves this engine's cache cannot be recorded; "" where it can."""
    if engine.policy is None:
        return NEVER_EVICTS
    return BY_LAYER if isinstance(engine.policy, LayerBudgets) else ""
