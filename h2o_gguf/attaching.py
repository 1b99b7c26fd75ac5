"""Attaches the native cache that a policy needs to a context."""

from __future__ import annotations

from typing import Any

from h2o_gguf.attic import Attic, AtticOptions
from h2o_gguf.errors import OptionError
from h2o_gguf.eviction import NativeCache
from h2o_gguf.policies import LayerBudgets, Policy
from h2o_gguf.sizes import Sizes

__all__ = ["attach", "open_attic"]


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


def open_attic(
    cache: NativeCache | None,
    policy: Policy | None,
    options: AtticOptions,
    weight_bytes: int,
    *,
    attention: str = "auto",
    can_take_back: bool = True,
) -> Attic | None:
    """Return the attic of an attached cache; None where there is none to be.

    weight_bytes : of the model. attention : as the cache was attached with. can_take_back : whether the
    model's newest tokens can be forgotten.

    Raises: OptionError, it is to keep what is never evicted, or the limit, type or folder does not fit.
    """
    if options.place == "off":
        return None
    if cache is None or policy is None:
        raise OptionError(
            "attic keeps what is evicted, and the policy is 'none': leave attic out, or choose a policy",
            "attic",
            "policy",
        )
    attic = Attic(cache.groups, policy, options, weight_bytes, is_attended=attention != "composed")
    if attic.n_asking and not can_take_back:
        raise OptionError(
            f"{policy.name} evicts the same positions from all layers (granularity 'token'); with an attic a "
            "question is read, forgotten and read again, and this model's recurrent state cannot forget: "
            "take granularity 'head' or 'layer', or no attic",
            "attic",
            "granularity",
        )
    return attic
