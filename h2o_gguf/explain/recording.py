"""When each entry left the cache and came back, noted while a sequence is read and written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.attic import Asking
from h2o_gguf.errors import OptionError
from h2o_gguf.explain.history import HELD, History, Recall, no_gaps
from h2o_gguf.policies import Cells, LayerBudgets
from h2o_gguf.view import CacheView

__all__ = ["MAX_TOKENS", "NEVER_EVICTS", "Recording", "check_length", "why_not_recorded"]

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
    """Notes every eviction and every recall of an engine from now on, until `close`.

    What a sequence before this one left behind is told by the cache, which knows what it holds and how much
    was recalled since it was cleared, and is overwritten or corrected.
    """

    def __init__(self, engine: Any) -> None:
        """engine : Engine.  Raises: OptionError, it never evicts, or has budgets by layer."""
        if reason := why_not_recorded(engine):
            raise OptionError(reason, "policy")
        self._engine = engine
        self._n_start = self._n_known = engine.n_past
        self._left = np.empty((engine.cache.n_layer, engine.cache.n_head_kv, 0), np.int32)
        self._recalls: list[Recall] = []
        if 0 < engine.n_past <= MAX_TOKENS:
            self._grow(engine.n_past)
            self._left[~_held(engine.cache.pos, self._left.shape[-1])] = engine.n_past
        engine.on_evict.append(self._note)
        engine.on_recall.append(self._note_recall)
        engine.on_adopt.append(self._look)

    def close(self) -> None:
        """Note nothing any more.  Calling twice is fine."""
        for listeners, listener in (
            (self._engine.on_evict, self._note),
            (self._engine.on_recall, self._note_recall),
            (self._engine.on_adopt, self._look),
        ):
            if listener in listeners:
                listeners.remove(listener)

    def history(self) -> History:
        """When each entry was in the cache.  What left before the recording began left at its beginning.

        Raises: OptionError, the sequence is longer than MAX_TOKENS.
        """
        n_past = self._engine.n_past
        check_length(n_past, "begin a new one")
        self._look()
        gaps = np.concatenate([no_gaps(), *(recall.gaps for recall in self._recalls)])
        return History(self._left[..., :n_past].copy(), gaps, tuple(self._recalls))

    def _look(self) -> None:
        """Know what the cache holds now, whatever came into it unnoticed."""
        n_past = self._engine.n_past
        if not self._goes_on(n_past, self._n_recalled()):
            return
        left = self._left[..., :n_past]
        is_held = _held(self._engine.cache.pos, n_past)
        left[~is_held & (left == HELD)] = self._n_start
        left[is_held] = HELD
        _cap(left, n_past)

    def _note(self, view: CacheView, victims: Cells) -> None:
        if not self._goes_on(view.n_past, self._n_recalled()):
            return
        self._left[..., : view.n_past][_held(view.pos, view.n_past)] = HELD
        pos = np.take_along_axis(view.pos, victims, axis=-1)
        np.put_along_axis(self._left, pos, view.n_past, axis=-1)

    def _note_recall(self, view: CacheView, n_tokens: int, asking: Asking) -> None:
        start, n_total = view.n_past - n_tokens, self._n_recalled()
        n_back = 0 if view.recalled is None else np.count_nonzero(view.recalled)
        if not self._goes_on(start, n_total - n_back):
            return
        self._n_known = view.n_past
        self._grow(view.n_past)
        is_held = _held(view.pos, view.n_past)
        left = self._left[..., : view.n_past]
        place = np.nonzero(is_held & (left != HELD))
        gone = left[place]
        gaps = np.stack([*place, gone, np.full_like(gone, start)], axis=-1).astype(np.int32)
        exchanged = np.argwhere(~is_held & (left == HELD)).astype(np.int32)
        left[tuple(exchanged.T)] = start
        left[is_held] = HELD
        self._recalls.append(Recall(start, view.n_past, view.pins, asking, n_total, gaps, exchanged))

    def _n_recalled(self) -> int:
        """Entries recalled since the sequence was cleared."""
        return int(self._engine.cache.attic.info().n_recalled)

    def _forget_recalls(self, n_total: int, n_past: int) -> None:
        """Those beyond n_total entries were of another sequence; times after n_past were taken back."""
        while self._recalls and self._recalls[-1].n_total > n_total:
            gaps = self._recalls.pop().gaps
            self._left[tuple(gaps[:, :3].T)] = gaps[:, 3]
        for i, recall in enumerate(self._recalls):
            if recall.end > n_past:
                gaps = recall.gaps.copy()
                gaps[:, 3:] = np.minimum(gaps[:, 3:], n_past)
                start, end = min(recall.start, n_past), min(recall.end, n_past)
                self._recalls[i] = replace(recall, start=start, end=end, gaps=gaps)

    def _goes_on(self, n_past: int, n_recalled: int) -> bool:
        """Know the first n_past positions, and what recalled so much; False where there are too many."""
        if n_past > MAX_TOKENS:
            self._left = self._left[..., :0]
            self._recalls.clear()
            return False
        self._grow(n_past)
        self._forget_recalls(n_recalled, n_past)
        if n_past < self._n_known:
            self._left[..., n_past : self._n_known] = HELD
            _cap(self._left, n_past)
        self._n_known = n_past
        return True

    def _grow(self, n: int) -> None:
        """Have room for n positions."""
        n_old = self._left.shape[-1]
        if n > n_old:
            grown = np.full((*self._left.shape[:-1], max(n, 2 * n_old)), HELD, np.int32)
            grown[..., :n_old] = self._left
            self._left = grown


def _cap(left: NDArray[np.int32], n_past: int) -> None:
    """What left later, left before that was taken back."""
    left[(left > n_past) & (left != HELD)] = n_past


def _held(pos: NDArray[np.int32], n: int) -> NDArray[np.bool_]:
    """Which positions are in the cache: bool[n_layer, n_head_kv, n]."""
    row, head, cell = np.nonzero(pos >= 0)
    held = np.zeros((*pos.shape[:2], n), np.bool_)
    held[row, head, pos[row, head, cell]] = True
    return held


def why_not_recorded(engine: Any) -> str:
    """Why what leaves this engine's cache cannot be recorded; "" where it can."""
    if engine.policy is None:
        return NEVER_EVICTS
    return BY_LAYER if isinstance(engine.policy, LayerBudgets) else ""
