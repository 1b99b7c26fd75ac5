"""From what a caller asks for to the numbers a context is made with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from h2o_gguf import policies
from h2o_gguf.cache_options import CacheOptions, chosen_policy, make_policy, refuse_cache_options
from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.models import ModelShape, require_support
from h2o_gguf.models.memory import MAX_CELLS, pad_cells
from h2o_gguf.policies import LayerBudgets, Policy

__all__ = ["N_BATCH", "Sizes", "plan_model_sizes", "plan_sizes"]

N_BATCH = 512
N_BATCH_MIN = 32
N_BATCH_SWA = 64


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
        refuse_cache_options(options)
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
    policy, is_given = chosen_policy(options, n_ctx if can_renumber else min(n_ctx, limit), layers)
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
            policy = make_policy(options, limit - overhead, layers)
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
