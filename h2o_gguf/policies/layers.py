"""Budgets that differ by layer: one policy of many, and PyramidKV's split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import OptionError
from h2o_gguf.policies import registry
from h2o_gguf.policies.base import Policy, as_policy, ask
from h2o_gguf.policies.selection import Cells
from h2o_gguf.policies.shares import whole
from h2o_gguf.view import CacheView

__all__ = ["LayerBudgets", "pyramid"]


@dataclass(frozen=True)
class LayerBudgets:
    """Give every layer a budget of its own; layers of equal budget share a cache of just the cells they need.

    budgets : entries per KV head after an eviction, >= 1, one for each layer that entries are evicted from.
    policy : who is evicted within a layer: a name with knobs, or a function from a budget to a policy.
    layers : the model layer of each budget; None: 0, 1, ..., which H2OLlama corrects for models where some
        layers have no such cache (sliding windows, recurrent layers).

    Victims are chosen among the layers of one budget at a time, so granularity "token" is one list for those.
    Raises: OptionError, numbers that contradict each other, or parts with different decay or traces;
        BudgetError, a budget is illegal.
    Source: budgets by layer as in PyramidKV, arXiv 2406.02069, see pyramid.
    """

    budgets: Sequence[int]
    policy: str | Callable[[int], Any] = "h2o+"
    knobs: Mapping[str, Any] = field(default_factory=dict)
    layers: Sequence[int] | None = None

    def __post_init__(self) -> None:
        budgets = tuple(whole("the budget", budget, 1) for budget in self.budgets)
        layers = tuple(range(len(budgets))) if self.layers is None else tuple(self.layers)
        if not budgets or len(layers) != len(budgets) or len(set(layers)) != len(layers):
            raise OptionError(
                f"{len(budgets)} budgets for {len(set(layers))} layers: give each evicted layer one", "policy"
            )
        object.__setattr__(self, "budgets", budgets)
        for name in ("decay", "n_trace"):
            found = sorted({getattr(part, name) for part in self.parts.values()})
            if len(found) > 1:
                raise OptionError(f"the policies of the layers differ in {name}: {found}", "policy")

    @cached_property
    def parts(self) -> dict[int, Policy]:
        """The policy of each budget, largest first."""
        return {budget: self._make(budget) for budget in sorted(set(self.budgets), reverse=True)}

    @cached_property
    def budget_of(self) -> dict[int, int]:
        """The budget of each model layer that has one."""
        layers = range(len(self.budgets)) if self.layers is None else self.layers
        return dict(zip(layers, self.budgets, strict=True))

    @property
    def name(self) -> str:
        """The name of the policy within a layer, and that layers differ."""
        return f"{self._first.name} by layer"

    @property
    def budget(self) -> int:
        """The largest of the budgets."""
        return self._first.budget

    @property
    def n_sink(self) -> int:
        """Sinks that are protected in all layers."""
        return min(part.n_sink for part in self.parts.values())

    @property
    def n_recent(self) -> int:
        """Recent entries that are protected in all layers."""
        return min(part.n_recent for part in self.parts.values())

    @property
    def needs_scores(self) -> bool:
        """Whether any layer's policy needs scores."""
        return any(part.needs_scores for part in self.parts.values())

    @property
    def decay(self) -> float:
        """The decay all layers share."""
        return self._first.decay

    @property
    def n_observed(self) -> int:
        """The largest n_observed."""
        return max(part.n_observed for part in self.parts.values())

    @property
    def n_trace(self) -> int:
        """The n_trace all layers share."""
        return self._first.n_trace

    @property
    def granularity(self) -> str:
        """Who shares one list of victims, as the policy within a layer says."""
        return str(getattr(self._first, "granularity", "head"))

    def for_layers(self, layers: Sequence[int]) -> LayerBudgets:
        """Return the same budgets for these model layers, unless they were named already.

        Raises: OptionError, there are more or fewer budgets than layers, or others were named.
        """
        named = tuple(layers) if self.layers is None else tuple(self.layers)
        if len(self.budgets) != len(layers) or set(named) != set(layers):
            raise OptionError(
                f"{len(self.budgets)} budgets, but entries are evicted from {len(layers)} layers of this "
                f"model ({', '.join(map(str, layers))}): give each of them one",
                "policy",
            )
        return replace(self, layers=named)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return n victims per KV head, named by the policy of these layers: int32[n_layer, n_head_kv, n].

        Raises: OptionError, the view shows layers of different budgets, or of none.
        """
        return ask(self._part(view), view, n)

    def observe(self, view: CacheView) -> NDArray[np.float32]:
        """Return the new traces of these layers: float32[n_trace, n_layer, n_head_kv, n_cells]."""
        part: Any = self._part(view)
        traces: NDArray[np.float32] = part.observe(view)
        return traces

    @property
    def _first(self) -> Policy:
        return next(iter(self.parts.values()))

    def _part(self, view: CacheView) -> Policy:
        budgets = {self.budget_of.get(il) for il in view.layer_ids}
        budget = next(iter(budgets))
        if len(budgets) > 1 or budget is None:
            raise OptionError(
                f"layers {', '.join(map(str, view.layer_ids))} share a cache and have the budgets "
                f"{', '.join(map(str, budgets))}: make the cache for this policy, as H2OLlama does",
                "policy",
            )
        return self.parts[budget]

    def _make(self, budget: int) -> Policy:
        if isinstance(self.policy, str):
            return registry.make(self.policy, budget, **self.knobs)
        if self.knobs:
            raise OptionError("knobs need a policy by name: a function sets them itself", "knobs", "policy")
        part = as_policy(self.policy(budget))
        if part.budget != budget:
            raise OptionError(
                f"the function made a policy with a budget of {part.budget} for {budget}", "policy"
            )
        return part


def pyramid(
    n_layer: int, mean_budget: int, n_recent: int = 0, beta: float = 20, n_classes: int = 5
) -> tuple[int, ...]:
    """Return budgets that fall linearly from the first layer to the last: n_layer of them.

    mean_budget : entries per KV head, over all layers; the budgets' mean is that or less, by less than one.
    n_recent : entries every layer gets before the rest is split, 0 .. mean_budget.
    beta : how steep, >= 1; of the rest, the last layer gets a beta-th of the mean.
    n_classes : different budgets, >= 1, each given to about as many layers: each needs a cache of its own.

    Raises: BudgetError, OptionError.
    Source: arXiv 2406.02069: m = B - w, low = m / beta, high = 2 m - low; steps are ours.
    """
    n_layer, n_classes = whole("n_layer", n_layer, 1), whole("n_classes", n_classes, 1)
    mean_budget, n_recent = whole("mean_budget", mean_budget, 1), whole("n_recent", n_recent, 0)
    if n_recent > mean_budget or not beta >= 1:
        raise OptionError(
            f"n_recent {n_recent} must be at most the mean budget {mean_budget}, and beta {beta} at least 1",
            "n_recent",
            "beta",
        )
    rest = mean_budget - n_recent
    low = rest / beta
    line = np.linspace(2 * rest - low, low, n_layer) if n_layer > 1 else np.array([float(rest)])
    classes = np.array_split(np.arange(n_layer), min(n_classes, n_layer))
    budgets = np.empty(n_layer, np.int64)
    for layers in classes:
        budgets[layers] = max(1, n_recent + int(np.floor(line[layers].mean() + 1e-9)))
    return tuple(int(budget) for budget in _fill(budgets, classes, mean_budget * n_layer))


def _fill(
    budgets: NDArray[np.int64], classes: Sequence[NDArray[np.int64]], n_entries: int
) -> NDArray[np.int64]:
    """Hand out what rounding left of n_entries, one to each layer of a class at a time."""
    for layers in classes:
        if budgets.sum() + layers.size > n_entries:
            break  # and not the ones above, which would then have less than these
        budgets[layers] += 1
    return budgets
