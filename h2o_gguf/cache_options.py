"""What a caller says of the cache, and the policy that it makes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from h2o_gguf import policies
from h2o_gguf.errors import OptionError
from h2o_gguf.policies import LayerBudgets, Policy

if TYPE_CHECKING:
    from h2o_gguf.layer_budgets import Budgets

__all__ = ["CacheOptions", "chosen_policy", "make_policy", "refuse_cache_options"]

SIZING = ("kv_budget", "heavy_ratio", "recent_ratio", "n_sink", "n_recent", "granularity", "layer_budgets")


@dataclass(frozen=True)
class CacheOptions:
    """The part of H2OLlama's options that sizes the cache; None where the caller said nothing."""

    policy: str | Policy | None = "h2o+"
    kv_budget: int | None = None
    heavy_ratio: float | None = None
    recent_ratio: float | None = None
    n_sink: int | None = None
    n_recent: int | None = None
    granularity: str | None = None
    layer_budgets: Budgets | None = None
    kv_block: int = 64
    n_ctx: int = 0
    n_batch: int | None = None
    n_ubatch: int | None = None

    @property
    def evicts(self) -> bool:
        """Whether entries are ever evicted; any policy object but ours may, whatever its name."""
        if isinstance(self.policy, str):
            return self.policy.strip().lower() != "none"
        return not (self.policy is None or isinstance(self.policy, policies.NoEviction))

    @property
    def is_default(self) -> bool:
        """Whether the caller left all of eviction to us."""
        return self.policy == "h2o+" and all(getattr(self, name) is None for name in SIZING)


def chosen_policy(options: CacheOptions, n_ctx: int, layers: Sequence[int]) -> tuple[Policy, bool]:
    """Return the policy, and whether the caller gave its budget.

    n_ctx : the budget if nobody names one. layers : that are evicted from, where budgets differ by layer.

    Raises: OptionError, BudgetError.
    """
    if not isinstance(options.policy, str):
        policy = policies.as_policy(options.policy)
        for name in SIZING[1:]:
            if getattr(options, name) is not None:
                raise OptionError(
                    f"{name} and a policy object both say it: set it on the policy", name, "policy"
                )
        if options.kv_budget not in (None, policy.budget):
            raise OptionError(
                f"kv_budget {options.kv_budget} contradicts the policy's budget {policy.budget}: give one",
                "kv_budget",
                "policy",
            )
        return _for_layers(policy, layers), True
    if options.layer_budgets is not None:
        _check_layer_budgets(options)
    if options.heavy_ratio is None and options.recent_ratio is None:
        is_given = options.kv_budget is not None or options.layer_budgets is not None
        budget = n_ctx if options.kv_budget is None else options.kv_budget
        return make_policy(options, budget, layers), is_given
    found = policies.resolve_budget(
        n_ctx,
        options.kv_budget,
        options.heavy_ratio,
        options.recent_ratio,
        n_recent=options.n_recent,
        n_sink=_default_sinks(str(options.policy)) if options.n_sink is None else options.n_sink,
    )
    return make_policy(options, found.budget, layers, n_recent=found.n_recent), True


def _check_layer_budgets(options: CacheOptions) -> None:
    sized = [n for n in ("kv_budget", "heavy_ratio", "recent_ratio") if getattr(options, n) is not None]
    if isinstance(options.layer_budgets, tuple):
        if sized:
            raise OptionError(
                f"layer_budgets has a budget for every layer, and {sized[0]} one for all: give one of them",
                "layer_budgets",
                sized[0],
            )
    elif not sized:
        raise OptionError(
            "layer_budgets splits a mean budget, and there is none: give kv_budget too", "layer_budgets"
        )


def _default_sinks(name: str) -> int:
    """The n_sink a policy has when nobody names one."""
    parameter = inspect.signature(policies.get(name)).parameters.get("n_sink")
    return parameter.default if parameter is not None and isinstance(parameter.default, int) else 0


def make_policy(options: CacheOptions, budget: int, layers: Sequence[int], **knobs: Any) -> Policy:
    """Return the policy of that name at a budget, split over the layers where that was said."""
    for name in ("n_sink", "n_recent", "granularity"):
        value = getattr(options, name)
        if value is not None:
            knobs.setdefault(name, value)
    name, said = str(options.policy), options.layer_budgets
    if said is None:
        return _for_layers(policies.make(name, budget=budget, **knobs), layers)
    if isinstance(policies.make(name, budget), LayerBudgets):
        raise OptionError(
            f"policy {name} splits its budget over the layers by itself: leave layer_budgets out, or choose "
            "another policy, such as policy='snapkv'",
            "layer_budgets",
            "policy",
        )
    if isinstance(said, tuple):
        return LayerBudgets(said, name, knobs, layers=tuple(layers) or None)
    return _for_layers(LayerBudgets(said(budget), name, knobs), layers)


def _for_layers(policy: Policy, layers: Sequence[int]) -> Policy:
    """The policy, with a budget for each of these layers where it has such."""
    return policy.for_layers(layers) if isinstance(policy, LayerBudgets) and layers else policy


def refuse_cache_options(options: CacheOptions) -> None:
    """Raise OptionError if a budget or a knob was given to nobody."""
    for name in SIZING:
        if getattr(options, name) is not None:
            raise OptionError(
                f"{name} needs a policy that evicts, and the policy is 'none': leave {name} out, "
                "or choose one, such as policy='h2o+'",
                name,
                "policy",
            )
