"""Between the native cache and a policy: the view goes in, checked victims come out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.pins import Span
from h2o_gguf.policies import Cells, Policy, ask, ask_traces
from h2o_gguf.saved_traces import SavedTraces
from h2o_gguf.traces import Traces
from h2o_gguf.view import CacheView

__all__ = ["Evictor", "NativeCache", "Notes", "OnEvict", "room_failure"]

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
    def raised(self) -> BaseException | None: ...
    def save(self) -> bytes: ...
    def load(self, data: bytes | memoryview) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Notes:
    """What an evictor knows of a sequence: where its newest prompt ends, and what a policy keeps of it."""

    n_prompt: int
    n_untraced: int
    traces: Mapping[tuple[int, ...], Traces]


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

    def attach(self, cache: NativeCache) -> None:
        """Become the policy of a native cache."""
        cache.set_policy(self)
        if self.policy.n_trace and self.policy.n_observed:
            cache.set_observer(self.follow)

    def __call__(self, native: Any, n: int) -> NDArray[np.int32]:
        """Return n victims per KV head: int32[n_layer, n_head_kv, n]."""
        self._traces_of(native).drop_from(int(native.n_past))
        view = self.view(native)
        if view.n_unobserved:
            view = self._observe(view)
        victims = ask(self.policy, view, n)
        for listener in self.on_evict:
            listener(view, victims)
        return victims

    def follow(self, native: Any, n_tokens: int) -> None:
        """Take note of a batch that was computed; observe while its queries are still recorded."""
        traces = self._traces_of(native)
        traces.drop_from(int(native.n_past) - n_tokens)
        # The next batch is taken to be as long as this one.
        if int(native.n_past) - traces.n_seen + n_tokens > self.policy.n_observed:
            self._observe(self.view(native))

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

    def saved_traces(self) -> tuple[SavedTraces, ...]:
        """What the policy keeps of entries, for `take_over`."""
        all_saved = (traces.save(layers) for layers, traces in self._traces.items())
        return tuple(saved for saved in all_saved if saved is not None)

    def notes(self) -> Notes:
        """What is known of the sequence now, to go back to."""
        traces = {layers: copy.copy(traces) for layers, traces in self._traces.items()}
        return Notes(self.n_prompt, self._n_untraced, traces)

    def go_back_to(self, notes: Notes) -> None:
        """The sequence is again as it was then."""
        self.n_prompt, self._n_untraced = notes.n_prompt, notes.n_untraced
        self._traces = {layers: copy.copy(traces) for layers, traces in notes.traces.items()}

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

    def view(self, native: Any) -> CacheView:
        """What the policy would see of a native view now."""
        # Copies: a policy may keep its view, and native memory ends with the cache.
        n_past, scores, pos = int(native.n_past), native.scores.copy(), native.pos.copy()
        traces = self._traces_of(native) if self.policy.n_trace > 0 else None
        return CacheView(
            scores=scores,
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


def room_failure() -> str:
    """Why the native part could not make room; to be asked right after the decode that failed."""
    from h2o_gguf.bindings.library import last_error

    return last_error() or "the native part gives no reason"
