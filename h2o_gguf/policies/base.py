"""What a policy is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, get_args, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import H2OError, OptionError, PolicyError, in_short
from h2o_gguf.policies.knobs import check_decay
from h2o_gguf.policies.selection import Cells, Granularity
from h2o_gguf.policies.shares import check_budget, whole
from h2o_gguf.view import CacheView

__all__ = ["Policy", "as_policy", "granularity_of", "is_policy"]


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
        raise PolicyError(f"it raised {in_short(error)}", policy=type(policy).__name__) from error


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


def granularity_of(policy: Policy) -> Granularity:
    """Who shares victims; of a policy that does not say, each head has its own."""
    granularity: Granularity = getattr(policy, "granularity", "head")
    return granularity if granularity in get_args(Granularity) else "head"
