"""What a policy is, and how it is asked."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import BudgetError, CacheFullError, H2OError, OptionError, PolicyError
from h2o_gguf.policies.selection import Cells, Granularity, check_granularity
from h2o_gguf.policies.shares import HALF, check_budget, whole
from h2o_gguf.view import CacheView

__all__ = [
    "Policy",
    "as_policy",
    "ask",
    "ask_traces",
    "check_victims",
    "granularity_of",
    "is_policy",
    "settle",
]


@runtime_checkable
class Policy(Protocol):
    """Who goes when room is needed.  A value, and pure: same view, same answer.

    Only budget and victims are required; as_policy fills in the rest.
    """

    @property
    def name(self) -> str:
        """How reports call it.  Default: the class name."""

    @property
    def budget(self) -> int:
        """Most entries per KV head after an eviction, >= 1."""

    @property
    def n_sink(self) -> int:
        """The first n_sink positions are never victims.  Default: 0."""

    @property
    def n_recent(self) -> int:
        """The newest n_recent positions are never victims, so rolling them back is exact.  Default: 0."""

    @property
    def needs_scores(self) -> bool:
        """Whether attention scores are summed.  Default: True."""

    @property
    def decay(self) -> float:
        """Factor by which scores fade per token, 0 to 1.  Default: 1, the plain sum."""

    @property
    def n_observed(self) -> int:
        """Queries of the newest n_observed tokens are recorded for view.observation.  Default: 0."""

    @property
    def n_trace(self) -> int:
        """Numbers carried along with every entry, in view.traces.  Default: 0.

        Its method observe(view) -> float32[n_trace, n_layer, n_head_kv, n_cells] returns the new traces, in
        an array that nobody can write to from then on.
        It is called before victims and, with n_observed, at least every n_observed tokens. Without, traces
        must follow from what the cache holds: entries of a session that another policy saved are shown as
        unobserved again.
        """

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return n different victims per KV head: int32[n_layer, n_head_kv, n], cell indices."""


@dataclass(frozen=True)
class _Completed:
    """A policy that left some attributes out."""

    inner: Any
    name: str
    budget: int
    n_sink: int
    n_recent: int
    needs_scores: bool
    decay: float
    n_observed: int
    n_trace: int

    def victims(self, view: CacheView, n: int) -> Cells:
        victims: Cells = self.inner.victims(view, n)
        return victims

    def observe(self, view: CacheView) -> NDArray[np.float32]:
        traces: NDArray[np.float32] = self.inner.observe(view)
        return traces


def is_policy(thing: Any) -> bool:
    """Whether as_policy can use it: it has a budget and a method victims(view, n)."""
    return (
        not isinstance(thing, type)
        and callable(getattr(thing, "victims", None))
        and "budget" in dir(thing)  # which does not run a property
    )


def as_policy(policy: Any) -> Policy:
    """Return policy with every attribute a Policy has, as checked numbers.

    policy : any object with budget and victims(view, n).

    Raises: OptionError, one of these is missing, or decay is outside 0 to 1. BudgetError, the numbers are
        illegal. PolicyError, an attribute raised.
    """
    if not is_policy(policy):
        raise OptionError(
            f"{policy!r} is no policy: it must be an object with a budget and a method victims(view, n)",
            "policy",
        )
    try:
        return _completed(policy)
    except H2OError:
        raise
    except Exception as error:  # a property of the caller's
        raise PolicyError(f"it raised {_in_short(error)}", policy=type(policy).__name__) from error


def _completed(policy: Any) -> Policy:
    n_recent = whole("n_recent", getattr(policy, "n_recent", 0), 0)
    numbers = check_budget(policy.budget, getattr(policy, "n_sink", 0), n_recent)
    decay = check_decay(getattr(policy, "decay", 1.0))
    n_trace = whole("n_trace", getattr(policy, "n_trace", 0), 0)
    if n_trace and not callable(getattr(policy, "observe", None)):
        raise OptionError(
            f"{type(policy).__name__} has an n_trace of {n_trace}, but no method observe(view) that returns "
            "the traces: add it, or leave n_trace out",
            "policy",
        )
    if isinstance(policy, Policy) and all(
        type(number) is int  # numpy's integers overflow where int does not
        for number in (policy.budget, policy.n_sink, policy.n_recent)
    ):
        return policy
    return _Completed(
        inner=policy,
        name=str(getattr(policy, "name", type(policy).__name__)),
        budget=numbers.budget,
        n_sink=numbers.n_sink,
        n_recent=numbers.n_recent,
        needs_scores=bool(getattr(policy, "needs_scores", True)),
        decay=decay,
        n_observed=whole("n_observed", getattr(policy, "n_observed", 0), 0),
        n_trace=n_trace,
    )


def settle(policy: Any, n_recent_most: int | None = None, recent_part: int = HALF) -> None:
    """Check the knobs of a frozen dataclass and turn an n_recent of AUTO into a number; for __post_init__.

    n_recent_most, recent_part : what AUTO stands for, as check_budget takes them.

    Raises: BudgetError, OptionError.
    """
    if "n_observed" in vars(policy):
        object.__setattr__(policy, "n_observed", check_whole("n_observed", policy.n_observed, 1))
    numbers = check_budget(policy.budget, policy.n_sink, policy.n_recent, n_recent_most, recent_part)
    object.__setattr__(policy, "budget", numbers.budget)
    object.__setattr__(policy, "n_sink", numbers.n_sink)
    object.__setattr__(policy, "n_recent", numbers.n_recent)
    check_decay(policy.decay)
    check_granularity(policy.granularity)


def granularity_of(policy: Policy) -> Granularity:
    """Who shares victims; of a policy that does not say, each head has its own."""
    granularity: Granularity = getattr(policy, "granularity", "head")
    return granularity if granularity in get_args(Granularity) else "head"


def check_whole(name: str, value: Any, at_least: int) -> int:
    """Return value as an int.  Raises: OptionError, it is no whole number or less than at_least."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise OptionError(f"{name} is {value!r}: it must be a whole number, {at_least} or more", name)
    return int(value)


def check_number(name: str, value: Any, low: float, high: float = np.inf) -> float:
    """Return value as a float.  Raises: OptionError, it is no number from low to high."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.floating)
        or not low <= value <= high
        or not np.isfinite(value)
    ):
        span = f"from {low:g} to {high:g}" if np.isfinite(high) else f"{low:g} or more"
        raise OptionError(f"{name} is {value!r}: it must be a number, {span}", name)
    return float(value)


def check_decay(decay: Any) -> float:
    """Return decay as a float.  Raises: OptionError, it is no number from 0 to 1."""
    if isinstance(decay, bool) or not isinstance(decay, int | float | np.floating) or not 0 <= decay <= 1:
        raise OptionError(f"decay is {decay!r}: it must be a number from 0 to 1 (1 forgets nothing)", "decay")
    return float(decay)


def ask(policy: Policy, view: CacheView, n: int) -> Cells:
    """Return the policy's n victims per KV head, checked: int32[n_layer, n_head_kv, n].

    What was recalled is spared where others are enough; where they are not, it is asked once more, with a
    view in which nothing was.

    Raises: CacheFullError, it evicts nothing. BudgetError, fewer than n entries of a head may go; the text
        says what protects the others. PolicyError, it raised, or chose victims it may not choose.
    """
    if view.recalled is not None:
        with contextlib.suppress(BudgetError):
            return _answer(policy, view, n)
        view = replace(view, recalled=None)
    return _answer(policy, view, n)


def _answer(policy: Policy, view: CacheView, n: int) -> Cells:
    try:
        victims = policy.victims(view, n)
    except CacheFullError:
        raise
    except Exception as error:
        _refuse_too_few(view, n, policy)
        if isinstance(error, H2OError):
            raise
        raise PolicyError(f"it raised {_in_short(error)}", policy=policy.name) from error
    return check_victims(view, victims, n, policy)


def ask_traces(policy: Any, view: CacheView) -> NDArray[np.float32]:
    """Return what observe(view) makes of the traces, checked: float32[n_trace, n_layer, n_head_kv, n_cells].

    Raises: PolicyError, it raised, or returned another shape or what is no finite number.
    """
    shape = (policy.n_trace, *view.shape)
    try:
        traces = np.asarray(policy.observe(view), np.float32)
    except H2OError:
        raise
    except Exception as error:
        raise PolicyError(f"observe raised {_in_short(error)}", policy=policy.name) from error
    if traces.shape != shape:
        raise PolicyError(
            f"observe returned shape {list(traces.shape)}: it must be [n_trace, n_layer, n_head_kv, n_cells] "
            f"= {list(shape)}",
            policy=policy.name,
        )
    n_bad = traces.size - np.count_nonzero(np.isfinite(traces))
    if n_bad:
        raise PolicyError(f"observe returned {n_bad} traces that are no finite number", policy=policy.name)
    return traces


def check_victims(view: CacheView, victims: Any, n: int, policy: Policy) -> Cells:
    """Return victims as int32[n_layer, n_head_kv, n] if every one may go.

    A policy of its own mind may name what was recalled, unless it is all that is left.

    Raises: PolicyError, no array, wrong type or shape, a cell outside the cache, empty or protected, or one
        twice in a head. BudgetError, fewer than n entries of a head may go at all.
    """
    try:
        cells = _checked(replace(view, recalled=None), victims, n, policy)
    except PolicyError:
        _refuse_too_few(view, n, policy)
        raise
    if view.recalled is not None and np.take_along_axis(view.recalled, cells, axis=-1).any():
        _refuse_too_few(view, n, policy)
    return cells


def _checked(view: CacheView, victims: Any, n: int, policy: Policy) -> Cells:
    n_layer, n_head_kv, n_cells = view.shape
    try:
        cells = np.asarray(victims)
    except Exception as error:  # ragged, or an object whose own conversion fails
        raise PolicyError(f"victims are no array: {_in_short(error)}", policy=policy.name) from error
    if not np.issubdtype(cells.dtype, np.integer):
        raise PolicyError(f"victims are {cells.dtype}: they must be integers", policy=policy.name)
    if cells.shape != (n_layer, n_head_kv, n):
        raise PolicyError(
            f"victims have shape {list(cells.shape)}: it must be [n_layer, n_head_kv, n] = "
            f"{[n_layer, n_head_kv, n]}",
            policy=policy.name,
        )
    _refuse(policy, cells, (cells < 0) | (cells >= n_cells), f"is outside the cache of {n_cells} cells")
    evictable = view.evictable(policy.n_sink, policy.n_recent, cells)
    if not evictable.all():
        _refuse(policy, cells, np.take_along_axis(view.pos, cells, axis=-1) < 0, "is empty")
        _refuse(policy, cells, ~evictable, "is a sink, pinned or recent")
    in_order = np.sort(cells, axis=-1)
    _refuse(policy, in_order[..., 1:], in_order[..., 1:] == in_order[..., :-1], "is named twice")
    return np.ascontiguousarray(cells, np.int32)


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _refuse(policy: Policy, cells: NDArray[Any], wrong: NDArray[np.bool_], why: str) -> None:
    if wrong.any():
        il, ih, i = np.argwhere(wrong)[0]
        raise PolicyError(
            f"victim {cells[il, ih, i]} of layer row {il}, KV head {ih} {why} "
            f"({np.count_nonzero(wrong)} such victims in all)",
            policy=policy.name,
        )


def _refuse_too_few(view: CacheView, n: int, policy: Policy) -> None:
    n_evictable = np.count_nonzero(view.evictable(policy.n_sink, policy.n_recent), axis=-1)
    if n_evictable.min() >= n:
        return
    il, ih = np.unravel_index(int(n_evictable.argmin()), n_evictable.shape)
    fewest = int(n_evictable[il, ih])
    used = view.pos[il, ih] >= 0
    is_sink = used & (view.pos[il, ih] < policy.n_sink)
    is_pinned = view.pinned()[il, ih] & ~is_sink
    n_used, n_sink, n_pinned = (int(np.count_nonzero(mask)) for mask in (used, is_sink, is_pinned))
    n_recent = n_used - fewest - n_sink - n_pinned
    raise BudgetError(
        f"{n} entries must go from every KV head, but only {fewest} of {n_used} may: {n_sink} are sinks, "
        f"{n_pinned} pinned, {n_recent} recent; raise the budget (kv_budget, {policy.budget}) by "
        f"{n - fewest} or more, or protect less",
        budget=policy.budget,
        n_sink=n_sink,
        n_recent=n_recent,
        n_pinned=n_pinned,
    )
