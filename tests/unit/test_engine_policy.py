"""The engine and its policy: budgets, mistakes, pins, and what a policy is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_fakes import N_VOCAB, evicting, logits_are_right, take

from h2o_gguf.decoding import DECODE_NO_VICTIMS
from h2o_gguf.errors import (
    BudgetError,
    PolicyError,
)
from h2o_gguf.policies import as_policy
from h2o_gguf.rows import PLAIN

# -- budget and policy -----------------------------------------------------------------------------------


def test_a_cache_at_rest_is_within_its_budget() -> None:
    e, _, cache = evicting(budget=20)
    e.prefill([1] * 33)
    assert cache.used() == 20
    take(e, 10)
    assert cache.used() == 20
    report = e.report()
    assert (report.policy, report.budget, report.used, report.evicted) == ("streaming", 20, 20, 22)
    assert (report.n_past, report.bytes) == (42, 4096)


@dataclass(frozen=True)
class Broken:
    budget: int = 20
    name: str = "broken"
    n_sink: int = 0
    n_recent: int = 8
    needs_scores: bool = False
    decay: float = 1.0
    n_observed: int = 0
    n_trace: int = 0
    mistake: Any = None

    def victims(self, view: Any, n: int) -> Any:
        if isinstance(self.mistake, BaseException):
            raise self.mistake
        return self.mistake(view, n)


@pytest.mark.parametrize(
    "mistake",
    [
        ZeroDivisionError("oops"),
        lambda view, n: np.zeros((1, 1, n + 1), np.int32),
        lambda view, n: np.zeros((1, 1, n), np.float32),
        lambda view, n: np.full((1, 1, n), 63, np.int32),
        lambda view, n: np.full((1, 1, n), view.n_used - 1, np.int32),
    ],
)
def test_a_policys_mistake_surfaces_from_the_call_and_the_engine_stays_usable(mistake: Any) -> None:
    e, context, _ = evicting(policy=Broken(mistake=mistake))
    with pytest.raises(PolicyError, match="broken") as caught:
        e.prefill([1] * 30)
    if isinstance(mistake, Exception):
        assert caught.value.__cause__ is mistake
    assert e.tokens == context.seen
    e.reset()
    e.prefill([1] * 10)
    assert logits_are_right(e, context)


def test_a_keyboard_interrupt_inside_a_policy_stays_one() -> None:
    e, context, _ = evicting(policy=Broken(mistake=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        e.prefill([1] * 30)
    assert e.tokens == context.seen


def test_a_policys_mistake_inside_the_decode_is_found_behind_the_native_code() -> None:
    error = ZeroDivisionError("oops")
    e, context, cache = evicting(policy=Broken(mistake=error))
    view = SimpleNamespace(
        scores=np.zeros((1, 1, 8), np.float32),
        pos=np.arange(8, dtype=np.int32).reshape(1, 1, 8),
        n_past=30,
        n_used=8,
        layer_ids=(0,),
        observation=None,
        recalled=np.zeros((1, 1, 8), np.bool_),
        rows=PLAIN,
    )

    def native_asks() -> None:
        with pytest.raises(PolicyError) as caught:
            cache.fn(view, 1)
        cache.error = caught.value

    context.before, context.codes = native_asks, [DECODE_NO_VICTIMS]
    with pytest.raises(PolicyError, match="oops"):
        e.prefill([1, 2, 3])
    assert e.tokens == context.seen == []


def test_pins_that_do_not_fit_are_refused_before_anything_changes() -> None:
    e, context, _ = evicting(budget=20)  # recent window 8
    e.sync([1, 2, 3], pins=[(0, 2)])
    with pytest.raises(BudgetError) as caught:
        e.sync([1, 2, 3, 4], pins=[(0, 13)])
    assert caught.value.n_pinned == 13
    assert e.tokens == context.seen == [1, 2, 3] and e.pins == [(0, 2)]


def test_pins_are_sorted_merged_and_counted_once() -> None:
    e, _, _ = evicting(budget=20)
    e.pins = [(8, 12), (0, 4), (3, 8), (15, 15)]
    assert e.pins == [(0, 12)]


# -- what the policy is told -----------------------------------------------------------------------------


@dataclass
class Noting:
    """Evicts the oldest, and notes (n_prompt, n_past) of every view."""

    budget: int = 20
    n_recent: int = 8
    notes: list[tuple[int, int]] = field(default_factory=list)

    def victims(self, view: Any, n: int) -> Any:
        self.notes.append((view.n_prompt, view.n_past))
        return np.where(view.pos >= 0, view.pos, 10**6).argsort(-1)[..., :n]


def test_the_policy_is_told_where_the_newest_prompt_ends() -> None:
    noting = Noting()
    e, _, _ = evicting(policy=as_policy(noting))
    e.prefill(list(range(1, 31)))
    assert noting.notes[-1] == (30, 30)
    take(e, 6)
    assert noting.notes[-1] == (30, e.n_past)
    e.prefill([1, 2, 3])
    assert noting.notes[-1] == (e.n_past, e.n_past)


def test_what_is_written_after_a_rollback_into_the_prompt_is_no_prompt() -> None:
    noting = Noting()
    e, _, _ = evicting(policy=as_policy(noting))
    e.prefill(list(range(1, 31)))
    assert e.rollback(26)
    e.prefill([1])
    assert e.rollback(26)
    e._logits = np.zeros(N_VOCAB, np.float32)
    take(e, 8)
    assert noting.notes[-1] == (26, e.n_past)


def test_an_eviction_by_another_policy_knows_where_the_prompt_ends_and_is_reported() -> None:
    other, told = Noting(budget=10), []
    e, _, cache = evicting(policy=as_policy(Noting(budget=30)))
    e.prefill(list(range(1, 16)))
    take(e, 4)
    e.on_evict.append(lambda view, victims: told.append(victims.shape[-1]))
    e.evict(as_policy(other))
    assert cache.used() == 10
    assert other.notes == [(15, e.n_past)]
    assert told == [e.n_past - 10]
