"""Attaches the native cache that a policy needs to a context."""

from __future__ import annotations

from typing import Any

from h2o_gguf.eviction import NativeCache
from h2o_gguf.policies import LayerBudgets, Policy
from h2o_gguf.sizes import Sizes

__all__ = ["attach"]


def attach(ctx_address: int, policy: Policy, sizes: Sizes, attention: str) -> NativeCache:
    """Return the native cache of a context that was made with these sizes.

    Raises: what h2o_gguf.bindings.KVCache raises.
    """
    from h2o_gguf.bindings import GroupedCache, KVCache

    params: dict[str, Any] = {
        "block": sizes.block,
        "decay": policy.decay,
        "attention": attention,
        "is_scored": policy.needs_scores,
        "n_observed": policy.n_observed,
        "n_pos_max": sizes.n_pos_max,
    }
    if isinstance(policy, LayerBudgets):
        return GroupedCache(ctx_address, policy.budget_of, **params)
    return KVCache(ctx_address, budget=policy.budget, **params)
