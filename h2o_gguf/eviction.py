"""Between the native cache and a policy: the view goes in, checked victims come out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import BudgetError
from h2o_gguf.policies import Cells, LayerBudgets, Policy, ask, ask_traces
from h2o_gguf.policies.shares import HALF, QUARTER
from h2o_gguf.saved_traces import SavedTraces
from h2o_gguf.traces import Traces
from h2o_gguf.view import CacheView

__all__ = ["Evictor", "NativeCache", "OnEvict", "Span", "budget_for", "check_pins", "room_failure"]

Span = tuple[int, int]  # half-open, positions
OnEvict = Callable[[CacheView, Cells], None]


class NativeCache(Protocol):
    """What the engine needs of h2o_gguf.bindings.KVCache, or GroupedCache."""

    @property
    def groups(self) -> Sequence[Any]: ...
    @property
    def budget(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    @property
    def n_evicted(self) -> int: ...
    @property
    def n_rebases(self) -> int: ...
    def view(self) -> Any: ...
    def used(self) -> int: ...
    def rollback_min(self) -> int: ...
    def set_policy(self, fn: Callable[[Any, int], NDArray[np.int32]] | None) -> None: ...
    def set_observer(self, fn: Callable[[Any, int], None] | None) -> None: ...
    def make_room(self, n_keep: int) -> int: ...
    def save(self) -> bytes: ...
    def load(self, data: bytes) -> None: ...
    def close(self) -> None: ...


class Evictor:
    """The callback a native cache asks for victims, and tells of every batch if the policy keeps traces.

    pins : the spans that are never victims; the engine changes them between calls.
    n_prompt : where the newest prompt ends; what is read after it was generated. The engine moves it.
    on_evict : told, in this order, what the policy saw and whom it chose.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.pins: tuple[Span, ...] = ()
        self.n_prompt = 0
        self.on_evict: list[OnEvict] = []
        self._traces: dict[tuple[int, ...], Traces] = {}  # by the layers that share a cache
        self._n_untraced = 0  # positions before it were read without traces
        self._error: BaseException | None = None
        self._cause: BaseException | None = None

    def attach(self, cache: NativeCache) -> None:
        """Become the policy of a native cache."""
        cache.set_policy(self)
        if self.policy.n_trace and self.policy.n_observed:
            cache.set_observer(self.follow)

    def __call__(self, native: Any, n: int) -> NDArray[np.int32]:
        """Return n victims per KV head: int32[n_layer, n_head_kv, n]."""
        try:
            self._traces_of(native).drop_from(int(native.n_past))
            view = self.view(native)
            if view.n_unobserved:
                view = self._observe(view)
            victims = ask(self.policy, view, n)
            for listener in self.on_evict:
                listener(view, victims)
            return victims
        except BaseException as error:
            self._keep(error)
            raise

    def follow(self, native: Any, n_tokens: int) -> None:
        """Take note of a batch that was computed; observe while its queries are still recorded."""
        try:
            traces = self._traces_of(native)
            traces.drop_from(int(native.n_past) - n_tokens)
            # The next batch is taken to be as long as this one.
            if int(native.n_past) - traces.n_seen + n_tokens > self.policy.n_observed:
                self._observe(self.view(native))
        except BaseException as error:
            self._keep(error)
            raise

    def drop_from(self, n_past: int) -> None:
        """The entries at positions >= n_past were removed, and others may take their place."""
        self.n_prompt = min(self.n_prompt, n_past)
        self._n_untraced = min(self._n_untraced, n_past)
        for traces in self._traces.values():
            traces.drop_from(n_past)

    def take_over(self, n_past: int, saved: Sequence[SavedTraces] = ()) -> None:
        """Another sequence of n_past tokens is in the cache now: a prompt, without queries.

        saved : its traces, of this policy; those of layers that share a cache here too are of use.
        """
        self.n_prompt = n_past
        self._n_untraced = n_past if self.policy.n_observed else 0  # without queries it is all there to see
        self._traces.clear()
        for each in saved:
            if each.numbers.shape[0] == self.policy.n_trace and 0 <= each.n_seen <= n_past:
                self._traces[each.layers] = Traces(self.policy.n_trace)
                self._traces[each.layers].put(each.pos, each.numbers, each.n_seen)

    def saved_traces(self, cache: NativeCache) -> tuple[SavedTraces, ...]:
        """The traces of what the cache holds, for `take_over`."""
        if not self.policy.n_trace:
            return ()
        views = [group.view() for group in cache.groups]
        return tuple(
            self._traces[layers].save(layers, view.pos)
            for view in views
            if (layers := tuple(view.layer_ids)) in self._traces
        )

    def successor(self, policy: Policy) -> Evictor:
        """Return one that goes on for another policy from what this one knows, which stays as it is.

        policy : of the same kind if it keeps traces; those of another number are of no use to it.
        """
        other = Evictor(policy)
        other.pins, other.n_prompt, other.on_evict = self.pins, self.n_prompt, self.on_evict
        if policy.n_observed and policy.n_trace == self.policy.n_trace:  # else it is all there to see
            other._traces = {layers: copy.copy(traces) for layers, traces in self._traces.items()}
            other._n_untraced = self._n_untraced
        return other

    @property
    def has_error(self) -> bool:
        """Whether `raise_error` would raise."""
        return self._error is not None

    def raise_error(self) -> None:
        """Raise what the policy raised since the last call of this method, if anything."""
        error, self._error = self._error, None
        if error is not None:
            raise error from self._cause

    def view(self, native: Any) -> CacheView:
        """What the policy would see of a native view now."""
        n_past, pos = int(native.n_past), native.pos.copy()
        traces = self._traces_of(native) if self.policy.n_trace > 0 else None
        return CacheView(
            # Copies: a policy may keep its view, and native memory ends with the cache.
            scores=native.scores.copy(),
            pos=pos,
            n_past=n_past,
            n_used=int(native.n_used),
            decay=self.policy.decay,
            layer_ids=tuple(native.layer_ids),
            pins=self.pins,
            n_prompt=self.n_prompt,
            traces=traces.at(pos, native.rows) if traces is not None else None,
            n_unobserved=max(0, n_past - traces.n_seen) if traces is not None else 0,
            observation=native.observation,
            recalled=native.recalled.copy() if np.count_nonzero(native.recalled) else None,
            rows=native.rows,
        )

    def _keep(self, error: BaseException) -> None:
        # Native code stands between here and the call that ran into it: raise_error brings it there.
        self._error, self._cause = error, error.__cause__

    def _traces_of(self, view: Any) -> Traces:
        """The traces of a view's layers; view : native, or a CacheView."""
        layers = tuple(view.layer_ids)
        if layers not in self._traces:
            self._traces[layers] = Traces(self.policy.n_trace, self._n_untraced)
        return self._traces[layers]

    def _observe(self, view: CacheView) -> CacheView:
        traces = ask_traces(self.policy, view)
        # They are kept without a copy: whoever wrote them may not any more.
        traces = traces if traces.flags.owndata else traces.copy()
        traces.setflags(write=False)
        self._traces_of(view).put(view.pos, traces, view.n_past)
        return replace(view, traces=traces, n_unobserved=0)


def check_pins(pins: Sequence[Span], policy: Policy) -> tuple[Span, ...]:
    """Return the spans sorted and merged.

    Raises: BudgetError, a span is not 0 <= start <= end, or they do not fit into the policy's budget beside
        its sinks and its recent window.
    """
    merged: list[list[int]] = []
    for start, end in sorted((int(s), int(e)) for s, e in pins):
        if start < 0 or end < start:
            raise BudgetError(f"pinned span ({start}, {end}) is not 0 <= start <= end", budget=policy.budget)
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    spans = tuple((start, end) for start, end in merged)
    if isinstance(policy, LayerBudgets):
        return _check_by_layer(spans, policy)
    n_pinned = sum(max(0, end - max(start, policy.n_sink)) for start, end in spans)
    if n_pinned + policy.n_sink + policy.n_recent > policy.budget:
        ways = [f"raise kv_budget to {budget_for(policy, n_pinned)} or more"]
        if policy.n_sink + policy.n_recent < policy.budget:
            ways.append("pin less")
        if (n_recent := policy.budget - policy.n_sink - n_pinned) > 0:
            ways.append(f"lower n_recent to {n_recent}")
        raise BudgetError(
            f"{n_pinned} pinned entries, {policy.n_sink} sinks and a recent window of {policy.n_recent} "
            f"do not fit into a budget of {policy.budget}: {', or '.join(ways)}",
            budget=policy.budget,
            n_sink=policy.n_sink,
            n_recent=policy.n_recent,
            n_pinned=n_pinned,
        )
    return spans


def _check_by_layer(spans: tuple[Span, ...], policy: LayerBudgets) -> tuple[Span, ...]:
    for budget, part in policy.parts.items():
        try:
            check_pins(spans, part)
        except BudgetError as error:
            if len(policy.parts) == 1:
                raise
            raise BudgetError(
                f"{error.n_pinned} pinned entries, {part.n_sink} sinks and a recent window of "
                f"{part.n_recent} do not fit into a budget of {budget}, which {policy.name} gives to some "
                "layers: raise kv_budget, split it less steeply (layer_budgets), or pin less",
                budget=budget,
                n_sink=part.n_sink,
                n_recent=part.n_recent,
                n_pinned=error.n_pinned,
            ) from error
    return spans


def budget_for(policy: Policy, n_pinned: int) -> int:
    """A budget that n_pinned entries beside the sinks fit into, also if the recent window grows with it."""
    for part in (HALF, QUARTER):  # of what the sinks leave is the window
        if policy.n_recent == max(0, policy.budget - policy.n_sink) // part:
            return policy.n_sink + -(-n_pinned * part // (part - 1))
    return policy.n_sink + n_pinned + policy.n_recent


def room_failure() -> str:
    """Why the native part could not make room; to be asked right after the decode that failed."""
    from h2o_gguf.bindings.library import last_error

    return last_error() or "the native part gives no reason"
