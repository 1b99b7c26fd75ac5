"""One policy while reading a prompt, another while writing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.observation import Floats, Observation, Rotation
from h2o_gguf.policies.base import Policy, as_policy
from h2o_gguf.policies.h2o_plus import H2OPlus
from h2o_gguf.policies.selection import Cells, Granularity
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.policies.snapkv import SnapKV
from h2o_gguf.view import CacheView

__all__ = ["Staged", "snapkv_then_h2o_plus"]


@dataclass(frozen=True)
class Staged:
    """Keep what one policy keeps of a prompt, and what another keeps once tokens are generated.

    Room is made by `prompt` as long as the newest token is a prompt's, by `generation` from then on.

    prompt, generation : policies of one budget and one granularity, and with one decay if both need scores.

    Source: ours, after arXiv 2404.14469 and 2406.02069, which evict from prompts only.
    """

    prompt: Policy
    generation: Policy

    name: ClassVar[str] = "staged"
    keeps: ClassVar[str] = "by one rule while reading, by another while writing"

    def __post_init__(self) -> None:
        for stage in ("prompt", "generation"):
            object.__setattr__(self, stage, as_policy(getattr(self, stage)))
        prompt, generation = self.prompt, self.generation
        if prompt.budget != generation.budget:
            raise BudgetError(
                f"prompt has a budget of {prompt.budget} and generation of {generation.budget}: a cache has "
                "one size, give both the same",
                budget=generation.budget,
            )
        for knob in ("granularity", "decay"):
            ours, theirs = getattr(prompt, knob, None), getattr(generation, knob, None)
            is_used = knob != "decay" or (prompt.needs_scores and generation.needs_scores)
            if is_used and ours != theirs:
                raise OptionError(
                    f"prompt has {knob} {ours!r} and generation {theirs!r}: they share one cache, give both "
                    "the same",
                    knob,
                )

    @property
    def budget(self) -> int:
        """Of both."""
        return self.generation.budget

    @property
    def granularity(self) -> Granularity:
        """Of both."""
        granularity: Granularity = getattr(self.generation, "granularity", "head")
        return granularity

    @property
    def n_sink(self) -> int:
        """What both protect."""
        return min(self.prompt.n_sink, self.generation.n_sink)

    @property
    def n_recent(self) -> int:
        """What both protect."""
        return min(self.prompt.n_recent, self.generation.n_recent)

    @property
    def needs_scores(self) -> bool:
        """Whether either does."""
        return self.prompt.needs_scores or self.generation.needs_scores

    @property
    def decay(self) -> float:
        """Of whichever needs scores."""
        return self.prompt.decay if self.prompt.needs_scores else self.generation.decay

    @property
    def n_observed(self) -> int:
        """As many as either needs."""
        return max(self.prompt.n_observed, self.generation.n_observed)

    @property
    def n_trace(self) -> int:
        """Of both: those of prompt come first."""
        return self.prompt.n_trace + self.generation.n_trace

    def observe(self, view: CacheView) -> NDArray[np.float32]:
        """Return the traces of both: float32[n_trace, n_layer, n_head_kv, n_cells].

        Both count every recorded query: whoever records fewer than the other is asked no more often.
        """
        stages: list[Any] = [stage for stage in (self.prompt, self.generation) if stage.n_trace]
        views = [replace(self._view_of(stage, view), observation=view.observation) for stage in stages]
        return np.concatenate([stage.observe(seen) for stage, seen in zip(stages, views, strict=True)])

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the victims the policy of this stage names: int32[n_layer, n_head_kv, n]."""
        stage = self.prompt if view.n_past <= view.n_prompt else self.generation
        return stage.victims(self._view_of(stage, view), n)

    def _view_of(self, stage: Policy, view: CacheView) -> CacheView:
        """The view as it would be if the stage were alone."""
        start = 0 if stage is self.prompt else self.prompt.n_trace
        return replace(
            view,
            decay=stage.decay,
            observation=None if view.observation is None else _Newest(view.observation, stage.n_observed),
            traces=None if view.traces is None else view.traces[start : start + stage.n_trace],
        )


def snapkv_then_h2o_plus(
    budget: int,
    n_sink: int = 4,
    n_recent: int = AUTO,
    granularity: Granularity = "head",
) -> Staged:
    """Return the Staged policy that is meant by its name alone: SnapKV for prompts, h2o+ for what follows."""
    return Staged(
        prompt=SnapKV(budget, n_sink, n_recent, granularity),
        generation=H2OPlus(budget, n_sink, n_recent, granularity),
    )


class _Newest:
    """An observation with the newest n queries of another."""

    def __init__(self, inner: Observation, n: int) -> None:
        self._inner = inner
        self._start = max(0, len(inner.query_pos) - n)
        self.query_pos = inner.query_pos[self._start :]

    def keys(self, row: int, cells: NDArray[np.integer[Any]] | None = None) -> Floats:
        return self._inner.keys(row, cells)

    def values(self, row: int, cells: NDArray[np.integer[Any]] | None = None) -> Floats:
        return self._inner.values(row, cells)

    def queries(self, row: int) -> Floats:
        return self._inner.queries(row)[:, :, self._start :]

    def logits(self, row: int, queries: Floats, keys: Floats) -> Floats:
        return self._inner.logits(row, queries, keys)

    def sinks(self, row: int) -> Floats | None:
        return self._inner.sinks(row)

    def rotation(self, row: int) -> Rotation | None:
        return self._inner.rotation(row)
