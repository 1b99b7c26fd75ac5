"""Budgets that differ by layer: one policy of many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.policies.asking import ask
from h2o_gguf.policies.base import Policy, as_policy
from h2o_gguf.policies.selection import Cells
from h2o_gguf.policies.shares import AUTO, whole
from h2o_gguf.policies.splits import Split
from h2o_gguf.view import CacheView

__all__ = ["LayerBudgets"]


@dataclass(frozen=True)
class LayerBudgets:
    """Give every layer a budget of its own; equal ones share a cache of just the cells they need.

    budgets : entries per KV head after an eviction, >= 1, one for each layer that entries are evicted from;
        or a Split of a mean, such as Pyramid(512), which for_layers turns into budgets.
    policy : who is evicted within a layer: a name with knobs, or a function from a budget to a policy.
    layers : the model layer of each budget; None: 0, 1, ..., which H2OLlama corrects for models where some
        layers have no such cache (sliding windows, recurrent layers).
    title : how reports call it; "": the policy's name, and that layers differ.

    Until for_layers has been asked, a Split is the same budget in every layer.
    Victims are chosen among the layers of one budget at a time, so granularity "token" is one list for those.
    Raises: OptionError, numbers that contradict each other, or parts with different decay or traces;
        BudgetError, a budget is illegal.
    Source: budgets by layer as in PyramidKV, arXiv 2406.02069, see splits.pyramid.
    """

    budgets: Sequence[int] | Split
    policy: str | Callable[[int], Any] = "h2o+"
    knobs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    layers: Sequence[int] | None = None
    title: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.budgets, Split):
            budgets = tuple(whole("the budget", budget, 1) for budget in self.budgets)
            layers = tuple(range(len(budgets))) if self.layers is None else tuple(self.layers)
            if not budgets or len(layers) != len(budgets) or len(set(layers)) != len(layers):
                raise OptionError(
                    f"{len(budgets)} budgets for {len(set(layers))} layers: give each layer with a cache one",
                    "policy",
                )
            object.__setattr__(self, "budgets", budgets)
        elif self.layers is not None:
            raise OptionError("a Split is told the layers by for_layers: leave layers out", "policy")
        for name in ("decay", "n_trace"):
            found = sorted({getattr(part, name) for part in self.parts.values()})
            if len(found) > 1:
                raise OptionError(f"the policies of the layers differ in {name}: {found}", "policy")

    @cached_property
    def parts(self) -> dict[int, Policy]:
        """The policy of each budget, largest first."""
        budgets = [self.budgets.mean] if isinstance(self.budgets, Split) else self.budgets
        return {budget: self._make(budget) for budget in sorted(set(budgets), reverse=True)}

    @cached_property
    def budget_of(self) -> dict[int, int]:
        """The budget of each model layer that has one; empty until a Split was told the layers."""
        if isinstance(self.budgets, Split):
            return {}
        layers = range(len(self.budgets)) if self.layers is None else self.layers
        return dict(zip(layers, self.budgets, strict=True))

    @property
    def name(self) -> str:
        """The title, or the name of the policy within a layer, and that layers differ."""
        return self.title or f"{self._first.name} by layer"

    @property
    def budget(self) -> int:
        """The largest of the budgets; the mean of a Split."""
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
        """Return the same budgets for these model layers, unless they were named already; those of a Split.

        Raises: OptionError, there are more or fewer budgets than layers, or others were named; BudgetError, a
            layer's share of a Split is too small for what the policy protects.
        """
        if isinstance(self.budgets, Split):
            return replace(self, budgets=self.budgets.over(layers, self._floor), layers=tuple(layers))
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
        return ask(self.part(view.layer_ids), view, n)

    def observe(self, view: CacheView) -> NDArray[np.float32]:
        """Return the new traces of these layers: float32[n_trace, n_layer, n_head_kv, n_cells]."""
        part: Any = self.part(view.layer_ids)
        traces: NDArray[np.float32] = part.observe(view)
        return traces

    def at_most(self, n: int) -> LayerBudgets:
        """Return the same with no budget above n."""
        if isinstance(self.budgets, Split):
            return self
        return replace(self, budgets=tuple(min(budget, n) for budget in self.budgets))

    @property
    def _floor(self) -> int:
        """Entries that the policy protects in a layer whatever its budget: no window that grows with it."""
        n_recent = self._first.n_recent
        if self.knobs.get("n_recent", AUTO) == AUTO:
            n_recent = min(n_recent, self._first.n_observed)
        return self._first.n_sink + n_recent

    @property
    def _first(self) -> Policy:
        return next(iter(self.parts.values()))

    def part(self, layers: Sequence[int]) -> Policy:
        """Return the policy of these layers of the model.

        Raises: OptionError, they have different budgets, or none.
        """
        if isinstance(self.budgets, Split):
            return self._first
        budgets = {self.budget_of.get(il) for il in layers}
        budget = next(iter(budgets))
        if len(budgets) > 1 or budget is None:
            raise OptionError(
                f"layers {', '.join(map(str, layers))} share a cache and have the budgets "
                f"{', '.join(map(str, budgets))}: make the cache for this policy, as H2OLlama does",
                "policy",
            )
        return self.parts[budget]

    def _make(self, budget: int) -> Policy:
        if isinstance(self.policy, str):
            from h2o_gguf.policies import registry  # which knows policies that are made of this class

            try:
                return registry.make(self.policy, budget, **self.knobs)
            except BudgetError as error:
                if isinstance(self.budgets, Split) or len(set(self.budgets)) == 1:
                    raise
                mean = sum(self.budgets) / len(self.budgets)
                raise BudgetError(
                    f"of a mean of {mean:g} entries, some layers get {budget}: {error}",
                    budget=budget,
                    n_sink=error.n_sink,
                    n_recent=error.n_recent,
                ) from error
        if self.knobs:
            raise OptionError("knobs need a policy by name: a function sets them itself", "knobs", "policy")
        part = as_policy(self.policy(budget))
        if part.budget != budget:
            raise OptionError(
                f"the function made a policy with a budget of {part.budget} for {budget}", "policy"
            )
        return part
