"""The evictor: traces observed in time, carried along and forgotten; errors of observers."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_gguf.errors import PolicyError
from h2o_gguf.eviction import Evictor
from h2o_gguf.policies import as_policy
from h2o_gguf.rows import PLAIN
from h2o_gguf.view import CacheView


@dataclass
class Counting:
    """Counts, for every entry, the queries that have been observed since it came."""

    budget: int = 8
    n_observed: int = 4
    n_trace: int = 1
    name: str = "counting"
    looks: list[tuple[int, int]] = field(default_factory=list)  # (n_past, n_unobserved)
    views: list[CacheView] = field(default_factory=list)

    def observe(self, view: CacheView) -> NDArray[Any]:
        self.looks.append((view.n_past, view.n_unobserved))
        assert view.traces is not None
        age = np.minimum(view.n_past - view.pos, view.n_unobserved)
        return np.where(view.pos >= 0, view.traces + age, 0)

    def victims(self, view: CacheView, n: int) -> NDArray[np.int64]:
        self.views.append(view)
        return np.where(view.pos >= 0, view.pos, 10**6).argsort(-1)[..., :n]


class Cache:
    """One layer, one head, entries in order of position; runs batches as the native cache does."""

    def __init__(self, evictor: Evictor, n_cells: int = 12) -> None:
        self.pos = np.full((1, 1, n_cells), -1, np.int32)
        self.n_past = 0
        self.observer: Any = None
        self.policy: Any = None
        evictor.attach(self)  # type: ignore[arg-type]

    def set_policy(self, fn: Any) -> None:
        self.policy = fn

    def set_observer(self, fn: Any) -> None:
        self.observer = fn

    def view(self) -> Any:
        return SimpleNamespace(
            scores=np.zeros(self.pos.shape, np.float32),
            pos=self.pos,
            n_past=self.n_past,
            n_used=int((self.pos >= 0).sum()),
            layer_ids=(0,),
            observation=None,
            recalled=np.zeros(self.pos.shape, np.bool_),
            rows=PLAIN,
        )

    def batch(self, n: int) -> None:
        missing = n - int((self.pos < 0).sum())
        if missing > 0:
            self.pos[0, 0, self.policy(self.view(), missing)[0, 0]] = -1
        free = np.flatnonzero(self.pos[0, 0] < 0)[:n]
        self.pos[0, 0, free] = np.arange(self.n_past, self.n_past + n)
        self.n_past += n
        if self.observer is not None:
            self.observer(self.view(), n)

    def roll_back(self, n_past: int) -> None:
        self.pos[self.pos >= n_past] = -1
        self.n_past = n_past


def started() -> tuple[Counting, Evictor, Cache]:
    policy = Counting()
    evictor = Evictor(as_policy(policy))
    return policy, evictor, Cache(evictor)


def test_every_query_is_observed_before_more_pile_up_than_are_recorded() -> None:
    policy, _, cache = started()
    for _ in range(40):
        cache.batch(1)
    assert all(n_unobserved <= policy.n_observed for _, n_unobserved in policy.looks)
    ends = [n_past for n_past, _ in policy.looks]
    assert sum(n for _, n in policy.looks) == ends[-1]  # none twice, none left out
    assert 40 - ends[-1] < policy.n_observed


def test_a_batch_longer_than_the_record_is_observed_once() -> None:
    policy, _, cache = started()
    cache.batch(7)
    cache.batch(5)
    assert policy.looks == [(7, 7), (12, 5)]


def test_what_observe_returned_is_kept_whatever_becomes_of_its_memory() -> None:
    memory = np.ones((1, 1, 1, 12), np.float32)

    class Careless(Counting):
        def observe(self, view: CacheView) -> NDArray[Any]:
            return memory[:]

    evictor = Evictor(as_policy(Careless()))
    cache = Cache(evictor)
    cache.batch(6)
    memory[:] = 5
    traces = evictor.view(cache.view()).traces
    assert traces is not None and traces.max() == 1


def test_victims_are_named_with_everything_observed() -> None:
    policy, _, cache = started()
    cache.batch(2)
    for _ in range(11):
        cache.batch(1)
    view = policy.views[-1]
    assert view.n_unobserved == 0
    assert view.traces is not None
    ages = np.where(view.pos >= 0, view.n_past - view.pos, 0)
    np.testing.assert_array_equal(view.traces[0], ages)


def test_tokens_in_place_of_rolled_back_ones_start_at_0() -> None:
    _, evictor, cache = started()
    for _ in range(10):
        cache.batch(1)
    cache.roll_back(6)
    for _ in range(6):
        cache.batch(1)
    view = evictor._observe(evictor.view(cache.view()))
    assert view.traces is not None
    # Positions before 6 counted queries that were taken back later; from 6 on only what came since.
    after = np.where(view.pos >= 6, view.n_past - view.pos, 0)
    np.testing.assert_array_equal(view.traces[0][view.pos >= 6], after[view.pos >= 6])


def test_a_cleared_sequence_leaves_nothing() -> None:
    policy, _, cache = started()
    for _ in range(10):
        cache.batch(1)
    cache.roll_back(0)
    cache.batch(4)
    assert policy.looks[-1] == (4, 4)


def test_what_needs_no_queries_is_observed_at_evictions_alone() -> None:
    policy = Counting(n_observed=0)
    evictor = Evictor(as_policy(policy))
    cache = Cache(evictor)
    for _ in range(12):
        cache.batch(1)
    assert policy.looks == []
    cache.batch(2)
    assert policy.looks == [(12, 12)]
    cache.roll_back(10)
    evictor.drop_from(10)  # as the engine says
    cache.batch(6)
    assert policy.looks == [(12, 12)]  # what is left has been seen
    cache.roll_back(0)
    evictor.drop_from(0)
    cache.batch(12)
    cache.batch(1)
    assert policy.looks[-1] == (12, 12)


def test_a_loaded_sequence_is_observed_again_where_no_queries_are_needed() -> None:
    policy = Counting(n_observed=0)
    evictor = Evictor(as_policy(policy))
    cache = Cache(evictor)
    cache.batch(12)
    evictor.take_over(12)
    cache.batch(2)
    assert policy.looks == [(12, 12)]


def test_another_sequence_starts_at_0_and_counts_as_a_prompt() -> None:
    _, evictor, cache = started()
    cache.batch(8)
    evictor.take_over(12)
    cache.n_past = 12  # a loaded session holds positions that were known
    cache.batch(2)
    view = evictor.view(cache.view())
    assert view.traces is not None
    assert (view.traces + view.n_unobserved).max() == 2
    assert view.n_prompt == 12


def test_a_policy_that_takes_over_goes_on_with_what_was_observed() -> None:
    _, evictor, cache = started()
    for _ in range(10):
        cache.batch(1)
    seen_before = evictor.view(cache.view()).n_unobserved
    successor = Counting()
    evictor.successor(as_policy(successor))(cache.view(), 3)
    assert successor.looks == [(10, seen_before)]
    view = successor.views[-1]
    assert view.traces is not None
    np.testing.assert_array_equal(view.traces[0], np.where(view.pos >= 0, view.n_past - view.pos, 0))
    assert evictor.view(cache.view()).n_unobserved == seen_before  # whose own are as they were


def test_traces_of_another_number_are_of_no_use_to_a_successor() -> None:
    _, evictor, cache = started()
    cache.batch(4)
    successor = Counting(n_trace=2)
    evictor.successor(as_policy(successor))(cache.view(), 1)
    assert successor.looks == [(4, 4)]


def test_a_policy_without_traces_is_not_told_of_batches() -> None:
    policy = Counting(n_trace=0)
    evictor = Evictor(as_policy(policy))
    cache = Cache(evictor)
    cache.batch(12)
    cache.batch(1)
    assert cache.observer is None
    assert policy.looks == []
    assert policy.views[0].traces is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (np.zeros((2, 1, 1, 12)), r"\[2, 1, 1, 12\].*must be .* = \[1, 1, 1, 12\]"),
        (np.full((1, 1, 1, 12), np.nan), "12 traces that are no finite number"),
        (RuntimeError("sick"), "observe raised RuntimeError: sick"),
    ],
)
def test_what_observe_does_wrong_is_told(answer: Any, words: str) -> None:
    class Wrong(Counting):
        def observe(self, view: CacheView) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    evictor = Evictor(as_policy(Wrong()))
    cache = Cache(evictor)
    with pytest.raises(PolicyError, match=words):
        cache.batch(5)
