"""One policy for prompts, another for what follows: each sees what it would see alone."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from observations import view_of

from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.policies import H2O, TOVA, H2OPlus, Lazy, Scissorhands, SnapKV, Staged, ask_traces, make
from h2o_gguf.view import CacheView


@dataclass
class Watching:
    """Evicts the oldest and keeps what it saw."""

    budget: int = 24
    n_observed: int = 3
    needs_scores: bool = False
    seen: list[CacheView] = field(default_factory=list)

    def victims(self, view: CacheView, n: int) -> Any:
        self.seen.append(view)
        return np.where(view.pos >= 0, view.pos, 10**6).argsort(-1)[..., :n]


@pytest.mark.parametrize(("n_prompt", "stage"), [(40, "prompt"), (41, "prompt"), (39, "generation")])
def test_the_newest_token_says_who_decides(n_prompt: int, stage: str) -> None:
    policy = Staged(prompt=SnapKV(24, n_recent=0), generation=H2OPlus(24, n_recent=0))
    view = replace(view_of(n_past=40), n_prompt=n_prompt)
    np.testing.assert_array_equal(policy.victims(view, 5), getattr(policy, stage).victims(view, 5))


def test_each_sees_its_own_queries() -> None:
    three, five = Watching(n_observed=3), Watching(n_observed=5)
    policy = Staged(prompt=three, generation=five)  # type: ignore[arg-type]
    assert policy.n_observed == 5
    view = replace(view_of(n_past=40, n_query=5), n_prompt=40)
    policy.victims(view, 2)
    policy.victims(replace(view, n_prompt=0), 2)
    assert three.seen[0].seen.query_pos.tolist() == [37, 38, 39]
    np.testing.assert_array_equal(three.seen[0].seen.queries(0), view.seen.queries(0)[:, :, 2:])
    np.testing.assert_array_equal(three.seen[0].attention(1), view.attention(1)[:, :, 2:])
    np.testing.assert_array_equal(five.seen[0].seen.queries(0), view.seen.queries(0))


def test_each_keeps_its_own_traces() -> None:
    lazy, scissors = Lazy(24, n_recent=0), Scissorhands(24, n_recent=0)
    policy = Staged(prompt=lazy, generation=scissors)
    view = view_of(n_past=40, n_query=8)
    staged = replace(view, traces=ask_traces(policy, view))
    assert policy.n_trace == 3
    for n_prompt, alone in ((40, lazy), (0, scissors)):
        expected = alone.victims(replace(view, traces=ask_traces(alone, view)), 6)
        np.testing.assert_array_equal(policy.victims(replace(staged, n_prompt=n_prompt), 6), expected)


def test_a_stage_that_records_fewer_queries_misses_none_of_those_in_between() -> None:
    """Tokens come one by one, and are observed when the longer record is full."""
    few, many = Scissorhands(24, n_recent=0, n_observed=2), Lazy(24, n_recent=0, n_observed=8)
    view = view_of(n_past=40, n_query=8, n_unobserved=8)
    traces = ask_traces(Staged(prompt=few, generation=many), view)
    for observer, start in ((Scissorhands(24, n_recent=0, n_observed=8), 0), (many, 1)):
        np.testing.assert_array_equal(traces[start : start + observer.n_trace], ask_traces(observer, view))


def test_what_it_needs_is_what_both_need() -> None:
    policy = Staged(prompt=SnapKV(24, 4, 6), generation=H2OPlus(24, 2, 8, decay=0.5))
    assert (policy.budget, policy.n_sink, policy.n_recent, policy.granularity) == (24, 2, 6, "head")
    assert (policy.needs_scores, policy.decay, policy.n_observed, policy.n_trace) == (True, 0.5, 32, 1)


def test_two_that_cannot_share_a_cache_are_refused() -> None:
    with pytest.raises(BudgetError, match="budget of 24 and generation of 25"):
        Staged(prompt=SnapKV(24), generation=H2O(25))
    with pytest.raises(OptionError, match="granularity 'layer' and generation 'head'"):
        Staged(prompt=TOVA(24), generation=H2O(24))
    with pytest.raises(OptionError, match=r"decay 1.0 and generation 0.9995"):
        Staged(prompt=H2O(24), generation=H2OPlus(24))


def test_the_name_alone_is_snapkv_then_the_default() -> None:
    assert make("staged", 64) == Staged(prompt=SnapKV(64, n_sink=4), generation=H2OPlus(64))
