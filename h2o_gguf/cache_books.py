"""The cache of a sequence at rest: its budget is kept, and it is shown."""

from __future__ import annotations

from h2o_gguf.books import Books
from h2o_gguf.errors import OptionError
from h2o_gguf.eviction import OnEvict
from h2o_gguf.policies import Policy
from h2o_gguf.report import KVReport, report_on
from h2o_gguf.view import CacheView

__all__ = ["CacheBooks"]


class CacheBooks(Books):
    """Evicts between batches, and says what the cache holds."""

    @property
    def on_evict(self) -> list[OnEvict]:
        """Who is told of every eviction before it happens: (what the policy saw, its victims).

        To be appended to and removed from; without a policy nobody is told.
        """
        return self._evictor.on_evict if self._evictor is not None else []

    def view(self) -> CacheView | None:
        """The cache as the policy would see it now; None without one."""
        if self.cache is None or self._evictor is None:
            return None
        return self._evictor.view(self.cache.view())

    def holds_all(self, n_tokens: int) -> bool:
        """Whether nothing was evicted, and n_tokens more can be read and rolled back before anything is."""
        if self.cache is None or self.context.n_swa > 0:  # whose rows go without us
            return False
        n_total = self.n_past + n_tokens
        return self.cache.rollback_min() == 0 and all(n_total <= group.budget for group in self.cache.groups)

    def keep_budget(self) -> None:
        """Evict down to the budget, so that a cache at rest is within it."""
        if self.cache is not None and self.policy is not None:
            self.cache.make_room(self.policy.budget)

    def evict(self, policy: Policy) -> None:
        """Evict once, down to the budget of another policy and as that one says; the engine's own stays.

        policy : of the same decay, scores, observed queries and traces as the engine's.
        """
        if self.cache is None or self._evictor is None:
            raise OptionError("nothing can be evicted from a context without an eviction cache", "policy")
        own = self.policy, self._evictor
        try:
            self.policy, self._evictor = policy, self._evictor.successor(policy)
            self.cache.set_policy(self._evictor)
            self.keep_budget()
        finally:
            self.policy, self._evictor = own
            self.cache.set_policy(self._evictor)

    def report(self) -> KVReport:
        """The state of the cache."""
        if self.cache is not None and self.policy is not None:
            return report_on(self.cache, self.policy, self.n_past, self.attic)
        n_cells, n_used = self.context.n_cells, min(self.n_past, self.context.n_cells)
        return KVReport(
            "none", min(self.n_ctx, n_cells), n_used, 0, self.n_past, self._kv_bytes,
            used_bytes=self._kv_bytes * n_used // max(1, n_cells),
        )  # fmt: skip
