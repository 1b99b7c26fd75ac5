"""What a cache weighs, before anything is loaded."""

from __future__ import annotations

import re
from dataclasses import dataclass

from h2o_gguf import models
from h2o_gguf.attic import LIMIT
from h2o_gguf.cache_options import CacheOptions
from h2o_gguf.cli.attic import attic_options
from h2o_gguf.cli.options import CacheFlags
from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.layer_budgets import Budgets
from h2o_gguf.models import ModelShape
from h2o_gguf.models.memory import pad_cells, type_problem
from h2o_gguf.policies import LayerBudgets
from h2o_gguf.sizes import Sizes, plan_model_sizes

__all__ = ["BUDGET", "AtticWeight", "Weight", "weigh", "weigh_attic"]

BUDGET = 1024


@dataclass(frozen=True)
class Weight:
    """KV bytes at a budget and at the full context.

    budget, n_cells, budget_bytes : None where the runtime refuses; of budgets by layer the means.
    layer_budgets : these; empty where all layers have the same. problem : why it does, else "".
    """

    budget: int | None
    n_cells: int | None
    budget_bytes: int | None
    problem: str
    n_ctx: int
    full_bytes: int
    type_k: str
    type_v: str
    layer_budgets: tuple[int, ...] = ()


def weigh(
    shape: ModelShape,
    budget: int | None,
    n_ctx: int,
    n_ubatch: int | None,
    type_k: str,
    type_v: str,
    layer_budgets: Budgets | None = None,
) -> Weight:
    """What a context for these options weighs, as the runtime plans it.  Raises: OptionError."""
    full = plan_model_sizes(CacheOptions(None, n_ctx=n_ctx, n_ubatch=n_ubatch), shape)
    bounded: Sizes | None = None
    problem = ""
    if models.support(shape).can_evict:
        try:
            bounded = _plan(shape, budget, n_ctx, n_ubatch, layer_budgets)
        except BudgetError as error:
            problem = str(error)

    def n_bytes(sizes: Sizes) -> int:
        memory = models.memory_bytes(
            shape, sizes.n_cells, sizes.n_ubatch, type_k, type_v, layer_cells=sizes.layer_cells
        )
        return memory.kv

    def by_layer(sizes: Sizes) -> tuple[list[int], list[int]]:
        """Budgets and cells."""
        assert sizes.policy is not None
        if not isinstance(sizes.policy, LayerBudgets):
            return [sizes.policy.budget], [sizes.n_cells]
        return list(sizes.policy.budget_of.values()), [pad_cells(n) for n in sizes.layer_cells if n]

    budgets, cells = by_layer(bounded) if bounded is not None else ([], [])
    return Weight(
        budget=sum(budgets) // len(budgets) if budgets else None,
        n_cells=sum(cells) // len(cells) if cells else None,
        budget_bytes=n_bytes(bounded) if bounded is not None else None,
        problem=problem,
        n_ctx=full.n_ctx,
        full_bytes=n_bytes(full),
        type_k=type_k,
        type_v=type_v,
        layer_budgets=tuple(budgets) if len(budgets) > 1 else (),
    )


@dataclass(frozen=True)
class AtticWeight:
    """How far an attic grows.

    limit : bytes. token_bytes : of one evicted token in all layers. n_tokens : that fit.
    """

    place: str
    limit: int
    type_k: str
    type_v: str
    token_bytes: int
    n_tokens: int


def weigh_attic(shape: ModelShape, cache: CacheFlags, why_never: str) -> AtticWeight | None:
    """What the attic of these flags takes at most; None without one.

    why_never : as attic_options takes it.  Raises: OptionError.
    """
    options = attic_options(cache, why_never)
    if options["attic"] == "off":
        return None
    type_k, type_v = (cache.attic_type or own for own in (cache.cache_type_k, cache.cache_type_v))
    if problem := type_problem(shape, type_k, type_v):
        raise OptionError(re.sub("cache-type-[kv]", "--attic-type", problem), "attic_type")
    limit = options["attic_limit"] or LIMIT
    n_bytes = models.entry_bytes(shape, type_k, type_v)
    return AtticWeight(options["attic"], limit, type_k, type_v, n_bytes, limit // n_bytes)


def _plan(
    shape: ModelShape,
    budget: int | None,
    n_ctx: int,
    n_ubatch: int | None,
    layer_budgets: Budgets | None,
) -> Sizes:
    def plan(kv_budget: int | None) -> Sizes:
        options = CacheOptions(
            kv_budget=kv_budget, layer_budgets=layer_budgets, n_ctx=n_ctx, n_ubatch=n_ubatch
        )
        return plan_model_sizes(options, shape)

    if budget is not None or isinstance(layer_budgets, tuple):
        return plan(budget)
    try:
        return plan(BUDGET)
    except BudgetError:
        return plan(None)
