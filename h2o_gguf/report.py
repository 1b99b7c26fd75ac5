"""What a result says about the cache."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["KVReport"]


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
    """

    policy: str
    budget: int
    used: int
    evicted: int
    n_past: int
    bytes: int
    n_rebases: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The report as the `kv` entry of a result."""
        return asdict(self)
