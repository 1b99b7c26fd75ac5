"""From what a caller asks for to the numbers a context is made with."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from h2o_gguf import policies
from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.models import ModelShape, require_support
from h2o_gguf.models.memory import MAX_CELLS, pad_cells
from h2o_gguf.policies import LayerBudgets, Policy

if TYPE_CHECKING:
    from h2o_gguf.layer_budgets import Budgets

__all__ = ["N_BATCH", "CacheOptions", "Sizes", "plan_model_sizes", "plan_sizes"]

N_BATCH = 512
N_BATCH_MIN = 32
N_BATCH_SWA = 64


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
        asked = (
            self.kv_budget,
            self.heavy_ratio,
            self.recent_ratio,
            self.n_sink,
            self.n_recent,
            self.granularity,
            self.layer_budgets,
        )
        return self.policy == "h2o+" and all(value is None for value in asked)


@dataclass(frozen=True)
class Sizes:
    """The numbers.

    policy : with its budget; None: nothing is evicted.
    n_cells : rows of the cache. n_ubatch : most tokens of one batch. block : entries evicted at once.
    n_pos_max : rotary positions stay below.
    n_ctx : the logical limit when nothing is evicted, else the window of positions.
    can_renumber : whether sequences may go past n_pos_max.
    layer_cells : rows of the cache of each model layer, 0 is n_cells; empty: all layers have n_cells.
    """

    policy: Policy | None
    n_ctx: int
    n_cells: int
    n_ubatch: int
    block: int
    n_pos_max: int
    can_renumber: bool = True
    layer_cells: tuple[int, ...] = ()


def plan_model_sizes(options: CacheOptions, shape: ModelShape) -> Sizes:
    """Return the sizes of a context for this model: what H2OLlama allocates for these options.

    Raises: UnsupportedModelError, entries shall be evicted and cannot be; OptionError, BudgetError.
    """
    if not options.evicts:
        return plan_sizes(options, shape.n_ctx_train)
    verdict = require_support(shape)
    sizes = plan_sizes(
        options,
        shape.n_ctx_train,
        verdict.n_pos_max,
        can_renumber=verdict.can_renumber,
        n_swa=shape.n_swa,
        layers=shape.evicted_layers,
    )
    if not isinstance(sizes.policy, LayerBudgets):
        return sizes
    overhead = max(sizes.n_ubatch, sizes.block)
    cells = {il: budget + overhead for il, budget in sizes.policy.budget_of.items()}
    return replace(sizes, layer_cells=tuple(cells.get(il, 0) for il in range(shape.n_layer_all)))


def plan_sizes(
    options: CacheOptions,
    n_ctx_train: int,
    n_pos_limit: int | None = None,
    *,
    can_renumber: bool = True,
    n_swa: int = 0,
    layers: Sequence[int] = (),
) -> Sizes:
    """Return the sizes of a context for a model trained on n_ctx_train tokens.

    Without eviction n_ctx is the longest sequence. With eviction a sequence has no end, and n_ctx bounds its
    memory and its positions: it is the budget when none is given, ratios are shares of it, and positions are
    renumbered before they pass it.

    n_pos_limit : positions the model can be asked for; None: n_ctx_train. can_renumber : whether keys can be
        moved to new positions; if not, a sequence ends at n_pos_limit.

    n_swa : the window of layers that keep a sliding window of their own; it and a batch must fit the cells.
    layers : the model's that are evicted from, for policies whose budgets differ by layer.

    Raises: OptionError, BudgetError, with the numbers.
    """
    n_ctx_train = min(n_ctx_train, MAX_CELLS)
    n_ctx = _check("n_ctx", options.n_ctx, 0) or n_ctx_train
    block = _check("kv_block", options.kv_block, 1)
    if not options.evicts:
        _refuse_cache_options(options)
        if isinstance(options.policy, policies.NoEviction):
            n_ctx = options.policy.budget
            if options.n_ctx not in (0, n_ctx):
                raise OptionError(
                    f"n_ctx {options.n_ctx} contradicts the policy's budget {n_ctx}: give one",
                    "n_ctx",
                    "policy",
                )
        n_ubatch = min(_n_batch(options, N_BATCH), n_ctx)
        return Sizes(None, n_ctx, n_ctx, n_ubatch, block, n_ctx)
    limit = min(n_pos_limit or n_ctx_train, MAX_CELLS)
    policy, is_given = _policy(options, n_ctx if can_renumber else min(n_ctx, limit), layers)
    n_ubatch = min(_n_batch(options, min(N_BATCH, max(N_BATCH_MIN, policy.budget))), n_ctx)
    overhead = max(n_ubatch, block)
    if not can_renumber:
        n_cells = pad_cells(max(policy.budget + overhead, n_swa + n_ubatch))
        return Sizes(policy, n_ctx, n_cells, n_ubatch, block, limit, can_renumber)
    # Positions are made consecutive while a whole batch lies beside the budget, so both must fit.
    if policy.budget + overhead > limit:
        if not is_given:
            n_ubatch = min(n_ubatch, max(min(N_BATCH_MIN, limit // 2), limit // 4))
            overhead = max(n_ubatch, min(block, limit // 4))
            policy = _make(options, limit - overhead, layers)
            if isinstance(policy, LayerBudgets):
                policy = policy.at_most(limit - overhead)
        else:
            room = limit - policy.budget
            block = min(block, max(room, 1))
            if options.n_batch is None and options.n_ubatch is None:
                n_ubatch = min(n_ubatch, max(room, 1))
            overhead = max(n_ubatch, block)
            if overhead > room:
                raise _no_room(options, policy, overhead, limit)
    n_pos_max = max(min(n_ctx, limit), policy.budget + overhead)
    block = min(block, overhead)
    n_cells = pad_cells(policy.budget + overhead)
    if n_swa + n_ubatch > n_cells:
        if options.n_batch is None and options.n_ubatch is None:
            n_ubatch = min(
                n_ubatch, max(N_BATCH_SWA, n_cells - n_swa)
            )  # rather a small batch than more cells
        n_cells = max(n_cells, pad_cells(n_swa + n_ubatch))
    return Sizes(policy, n_ctx, n_cells, n_ubatch, block, n_pos_max, can_renumber)


def _no_room(options: CacheOptions, policy: Policy, n_batch: int, limit: int) -> BudgetError:
    budget, share = policy.budget, 1.0
    if isinstance(policy, LayerBudgets):  # all of which shrink with their mean
        mean = sum(policy.budget_of.values()) / max(1, len(policy.budget_of))
        share = mean / budget
    asked = {name: getattr(options, name) for name in ("n_batch", "n_ubatch")}
    name = min((n for n in asked if asked[n] is not None), key=lambda n: asked[n], default="n_batch")
    ways = (("kv_budget", int(share * (limit - n_batch))), (name, limit - budget))
    hint = ", or ".join(f"{name} to {value}" for name, value in ways if value > 0)
    return BudgetError(
        f"a budget of {budget} entries and a batch of {n_batch} tokens exceed the {limit} positions "
        f"the model knows: lower {hint}",
        budget=budget,
    )


def _policy(options: CacheOptions, n_ctx: int, layers: Sequence[int]) -> tuple[Policy, bool]:
    """The policy, and whether the caller gave its budget."""
    if not isinstance(options.policy, str):
        policy = policies.as_policy(options.policy)
        for name in ("heavy_ratio", "recent_ratio", "n_sink", "n_recent", "granularity", "layer_budgets"):
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
        return _make(options, n_ctx if options.kv_budget is None else options.kv_budget, layers), is_given
    found = policies.resolve_budget(
        n_ctx,
        options.kv_budget,
        options.heavy_ratio,
        options.recent_ratio,
        n_recent=options.n_recent,
        n_sink=_default_sinks(str(options.policy)) if options.n_sink is None else options.n_sink,
    )
    return _make(options, found.budget, layers, n_recent=found.n_recent), True


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


def _make(options: CacheOptions, budget: int, layers: Sequence[int], **knobs: Any) -> Policy:
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


def _refuse_cache_options(options: CacheOptions) -> None:
    for name in (
        "kv_budget",
        "heavy_ratio",
        "recent_ratio",
        "n_sink",
        "n_recent",
        "granularity",
        "layer_budgets",
    ):
        if getattr(options, name) is not None:
            raise OptionError(
                f"{name} needs a policy that evicts, and the policy is 'none': leave {name} out, "
                "or choose one, such as policy='h2o+'",
                name,
                "policy",
            )


def _n_batch(options: CacheOptions, default: int) -> int:
    """Tokens computed at once; llama.cpp's two batch sizes are one here, since room is made by batch."""
    asked = [_check(name, value, 1) for name, value in
             (("n_batch", options.n_batch), ("n_ubatch", options.n_ubatch)) if value is not None]  # fmt: skip
    return min(asked) if asked else default


def _check(name: str, value: Any, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= MAX_CELLS:
        raise OptionError(
            f"{name} is {value!r}: it must be a whole number from {at_least} to {MAX_CELLS:,}", name
        )
    return value
