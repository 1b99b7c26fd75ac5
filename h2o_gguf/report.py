"""What a result says about the cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from h2o_gguf.attic import Attic, AtticReport
from h2o_gguf.eviction import NativeCache
from h2o_gguf.policies import LayerBudgets, Policy, Split

__all__ = ["KVReport", "report_on"]


@dataclass(frozen=True)
class KVReport:
    """The state of the KV cache after a call.

    policy : name of the policy, "none" if nothing is ever evicted.
    budget : most entries per KV head after an eviction; the context's length for "none".
    used : entries per KV head now.
    evicted : entries per KV head evicted since the last reset.
    n_past : tokens of the sequence so far, the evicted ones included.
    bytes : size of the KV cache as allocated.
    n_rebases : how often positions were renumbered since the last reset.
    used_bytes : of the entries that are held now.
    attic : where evicted entries stay; None: they are lost.
    layer_budgets : the budget of each layer that is evicted from; empty where all have the same. budget and
        used are then means, and evicted what is missing on average.
    """

    policy: str
    budget: int
    used: int
    evicted: int
    n_past: int
    bytes: int
    n_rebases: int = 0
    used_bytes: int = 0
    layer_budgets: tuple[int, ...] = ()
    attic: AtticReport | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as the `kv` entry of a result, plain enough for JSON."""
        return asdict(self) | {"layer_budgets": list(self.layer_budgets)}


def report_on(cache: NativeCache, policy: Policy, n_past: int, attic: Attic | None) -> KVReport:
    """The state of a cache that is evicted from, and of its attic."""
    by_layer = policy.budgets if isinstance(policy, LayerBudgets) else ()
    return KVReport(
        policy=policy.name,
        budget=cache.budget,
        used=cache.used(),
        evicted=cache.n_evicted,
        n_past=n_past,
        bytes=cache.kv_bytes,
        n_rebases=cache.n_rebases,
        used_bytes=cache.used_bytes,
        layer_budgets=() if isinstance(by_layer, Split) else tuple(by_layer),
        attic=attic.report() if attic is not None else None,
    )
