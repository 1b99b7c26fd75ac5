"""What a cache weighs, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_gguf import models
from h2o_gguf.cache_options import CacheOptions
from h2o_gguf.errors import BudgetError
from h2o_gguf.layer_budgets import Budgets
from h2o_gguf.models import ModelShape
from h2o_gguf.models.memory import pad_cells
from h2o_gguf.policies import LayerBudgets
from h2o_gguf.sizes import Sizes, plan_model_sizes

__all__ = ["BUDGET", "Weight", "weigh"]

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
