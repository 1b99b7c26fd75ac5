"""GroupedCache: the groups of a context, whose layers have budgets of their own, as one cache."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.bindings.cache import KVCache
from h2o_gguf.bindings.native_view import NativeView
from h2o_gguf.errors import BudgetError, OptionError, StateFileError

__all__ = ["GroupedCache"]

SIZE = struct.Struct("<Q")  # before each group's state


class GroupedCache:
    """Attached to all groups of a llama_context.  Entries per KV head are means over the layers, cut to ints.

    ctx_address, block, decay, attention, n_pos_max, is_scored : as KVCache takes them.
    budgets : entries per KV head of each evicted layer, by model layer; equal within a group.

    Raises: BudgetError, the budgets of a group differ, or one is missing or larger than its cells; what
        KVCache raises.
    """

    def __init__(
        self,
        ctx_address: int,
        budgets: Mapping[int, int],
        *,
        block: int = 64,
        decay: float = 1.0,
        **params: Any,
    ) -> None:
        params.update(block=block, decay=decay)
        self._first = KVCache(ctx_address, budget=0, **params)
        try:
            for group in self.groups:
                group.set_params(budget=_budget_of(group, budgets), **params)
        except BaseException:
            self.close()
            raise
        self._budgets = [budgets[group.layer_ids[0]] for group in self.groups]

    @property
    def groups(self) -> tuple[KVCache, ...]:
        """One KVCache a group, by first layer."""
        return self._first.groups

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V as allocated, all groups and sliding-window layers together."""
        return sum(group.kv_bytes for group in self.groups)

    @property
    def used_bytes(self) -> int:
        """Bytes of the entries that are held now, as KVCache counts them, all groups together."""
        return sum(group.used_bytes for group in self.groups)

    @property
    def budget(self) -> int:
        """Entries per KV head after an eviction."""
        return self._mean(self._budgets)

    @property
    def n_evicted(self) -> int:
        """Entries evicted per KV head since the sequence was cleared: all of it but used()."""
        return self._first.n_past() - self.used()

    @property
    def n_rebases(self) -> int:
        """How often the keys were re-rotated since the sequence was cleared."""
        return self._first.n_rebases

    def used(self) -> int:
        """Entries per KV head."""
        return self._mean([group.used() for group in self.groups])

    def _mean(self, numbers: Sequence[int]) -> int:
        n_layer = [group.n_layer for group in self.groups]
        return sum(n * number for n, number in zip(n_layer, numbers, strict=True)) // sum(n_layer)

    def view(self) -> NativeView:
        """Raise OptionError: there is no view of layers with different cells, only one of each group."""
        raise OptionError("the layers have caches of different sizes: ask each of the groups for its view")

    def rollback_min(self) -> int:
        """The smallest p for which removing every position >= p is exact in all groups."""
        return self._first.rollback_min()

    def set_policy(self, fn: Callable[[NativeView, int], NDArray[np.int32]] | None) -> None:
        """Set who names victims; the view's layer_ids tell the group.  See KVCache.set_policy."""
        for group in self.groups:
            group.set_policy(fn)

    def set_observer(self, fn: Callable[[NativeView, int], None] | None) -> None:
        """Set who watches every group: fn(view, n_tokens), after each ubatch.  See KVCache.set_observer."""
        for group in self.groups:
            group.set_observer(fn)

    def raised(self) -> BaseException | None:
        """Return what a callback raised since the last call of this method, if anything."""
        raised = [group.raised() for group in self.groups]
        return next((error for error in raised if error is not None), None)

    def make_room(self, n_keep: int) -> int:
        """Leave every group at most n_keep entries per KV head, and at most its budget.

        Returns how many were evicted where most were.  Raises as KVCache.make_room.
        """
        return max(
            group.make_room(min(n_keep, budget))
            for group, budget in zip(self.groups, self._budgets, strict=True)
        )

    def save(self) -> bytes:
        """Return positions, scores and counters of all groups."""
        states = [group.save() for group in self.groups]
        return b"".join(SIZE.pack(len(state)) + state for state in states)

    def load(self, data: bytes | memoryview) -> None:
        """Restore what save() returned, after llama.cpp restored its own state.

        Raises: StateFileError, it does not fit.
        """
        for group in self.groups:
            end = SIZE.size + SIZE.unpack_from(data)[0] if len(data) >= SIZE.size else SIZE.size
            if end > len(data):
                raise StateFileError(f"the saved state of {len(self.groups)} groups of layers is cut short")
            group.load(data[SIZE.size : end])
            data = data[end:]
        if data:
            raise StateFileError(f"the saved state has {len(data)} bytes after its {len(self.groups)} groups")

    def close(self) -> None:
        """Detach.  Calling twice is fine."""
        self._first.close()


def _budget_of(group: KVCache, budgets: Mapping[int, int]) -> int:
    wanted = {budgets.get(il, 0) for il in group.layer_ids}
    if len(wanted) != 1 or 0 in wanted:
        raise BudgetError(
            f"layers {', '.join(map(str, group.layer_ids))} share a cache of {group.n_cells} cells and are "
            f"to have budgets of {', '.join(map(str, sorted(wanted)))}: they need one budget"
        )
    return wanted.pop()
