"""Evict nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from h2o_gguf.errors import CacheFullError
from h2o_gguf.policies.selection import Cells
from h2o_gguf.policies.shares import check_budget
from h2o_gguf.view import CacheView

__all__ = ["NoEviction"]


@dataclass(frozen=True)
class NoEviction:
    """Evict nothing: a full cache is an error.  Source: the full cache every policy is measured against.

    budget : entries per KV head, >= 1; all there will ever be.
    """

    budget: int

    name: ClassVar[str] = "none"
    keeps: ClassVar[str] = "all"
    n_sink: ClassVar[int] = 0
    n_recent: ClassVar[int] = 0
    needs_scores: ClassVar[bool] = False
    n_observed: ClassVar[int] = 0
    n_trace: ClassVar[int] = 0
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "budget", check_budget(self.budget, 0, 0).budget)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Raise CacheFullError, always."""
        raise CacheFullError(view.n_used, view.shape[-1])
