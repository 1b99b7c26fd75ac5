"""Asking a policy: a bare object is enough, and what it returns is checked in words."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from h2o_gguf.errors import BudgetError, OptionError, PolicyError
from h2o_gguf.policies import H2O, H2OPlus, Policy, as_policy, ask, check_victims, make, names
from h2o_gguf.view import CacheView


class FromANotebook:
    budget = 16

    def victims(self, view: CacheView, n: int) -> Any:
        oldest_first = np.where(view.pos >= 0, view.pos, view.n_past).argsort(axis=-1)
        return oldest_first[..., :n]


@dataclass
class Returning:
    answer: Any
    budget: int = 16
    name: str = "fixed"
    n_sink: int = 2
    n_recent: int = 3
    seen: list[int] = field(default_factory=list)

    def victims(self, view: CacheView, n: int) -> Any:
        self.seen.append(0 if view.recalled is None else int(np.count_nonzero(view.recalled[0, 0])))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def a_view(pins: tuple[tuple[int, int], ...] = ()) -> CacheView:
    """Two layers, two heads; 12 cells with positions 0 to 9 in the first ten."""
    pos = np.tile(np.r_[np.arange(10), -1, -1].astype(np.int32), (2, 2, 1))
    return CacheView(np.zeros(pos.shape, np.float32), pos, 10, 10, pins=pins)


def everywhere(*cells: int) -> Any:
    return np.tile(np.array(cells, np.int32), (2, 2, 1))


def test_a_bare_object_is_a_policy_with_defaults() -> None:
    policy = as_policy(FromANotebook())
    assert isinstance(policy, Policy)
    assert (policy.name, policy.budget, policy.n_sink, policy.n_recent) == ("FromANotebook", 16, 0, 0)
    assert (policy.needs_scores, policy.decay) == (True, 1.0)
    victims = ask(policy, a_view(), 3)
    assert victims.dtype == np.int32
    assert victims[1, 1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", names())
def test_ours_are_complete_and_stay_themselves(name: str) -> None:
    policy = make(name, budget=64)
    assert as_policy(policy) is policy
    assert policy.name == name
    assert hash(policy) == hash(make(name, budget=64))


@pytest.mark.parametrize("thing", [None, "h2o", H2O, object(), Returning])
def test_what_is_no_policy_is_refused(thing: Any) -> None:
    with pytest.raises(OptionError, match="no policy"):
        as_policy(thing)


def test_numpys_integers_become_int_where_they_would_overflow() -> None:
    policy = as_policy(Returning(None, budget=np.uint8(200), n_sink=np.int8(2), n_recent=np.uint8(8)))
    numbers = policy.budget, policy.n_sink, policy.n_recent
    assert numbers == (200, 2, 8) and {type(number) for number in numbers} == {int}


def test_a_property_that_raises_is_a_policys_error() -> None:
    class Broken(FromANotebook):
        @property
        def budget(self) -> int:  # type: ignore[override]
            raise KeyError("mine")

    with pytest.raises(PolicyError, match="'Broken': it raised KeyError: 'mine'"):
        as_policy(Broken())


class Explosive:
    def __array__(self, *_: Any, **__: Any) -> Any:
        raise KeyError("mine")


@pytest.mark.parametrize(
    ("answer", "words"), [([[1], [1, 2]], "inhomogeneous"), (Explosive(), "KeyError: 'mine'")]
)
def test_victims_that_are_no_array_are_a_policys_error(answer: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=f"victims are no array: .*{words}"):
        ask(as_policy(Returning(answer)), a_view(), 2)


def test_illegal_numbers_of_a_foreign_policy_are_refused() -> None:
    with pytest.raises(BudgetError, match="20 sinks"):
        as_policy(Returning(None, n_sink=20))
    with pytest.raises(BudgetError, match="n_recent is -1"):
        as_policy(Returning(None, n_recent=-1))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (everywhere(2, 3).astype(np.float32), "float32"),
        (everywhere(0, 1) == 0, "bool"),
        (everywhere(2, 3, 4), r"\[2, 2, 3\].*\[2, 2, 2\]"),
        (everywhere(2, 3)[0], r"\[2, 2\]"),
        (None, "object"),
        (everywhere(2, 12), "outside the cache of 12 cells"),
        (everywhere(-1, 2), "outside"),
        (everywhere(2, 11), "is empty"),
        (everywhere(2, 1), "victim 1 .*sink"),
        (everywhere(2, 7), "victim 7 .*recent"),
        (everywhere(2, 4), "victim 4 .*pinned"),
        (everywhere(3, 3), "named twice"),
        (ZeroDivisionError("division by zero"), "it raised ZeroDivisionError: division by zero"),
    ],
)
def test_illegal_answers_are_refused_in_words(answer: Any, words: str) -> None:
    with pytest.raises(PolicyError, match=words) as caught:
        ask(as_policy(Returning(answer)), a_view(pins=((4, 5),)), 2)
    assert caught.value.policy == "fixed"
    assert "'fixed'" in str(caught.value)


def test_one_wrong_head_is_named() -> None:
    answer = everywhere(2, 3)
    answer[1, 0, 1] = 0
    with pytest.raises(PolicyError, match=r"victim 0 of layer row 1, KV head 0 .*\(1 such victims in all\)"):
        check_victims(a_view(), answer, 2, as_policy(Returning(None)))


def test_legal_answers_of_any_integer_type_pass() -> None:
    for dtype in (np.int64, np.uint8, np.int32):
        victims = check_victims(a_view(), everywhere(6, 2).astype(dtype), 2, as_policy(Returning(None)))
        assert victims.dtype == np.int32
        assert victims[0, 0].tolist() == [6, 2]


def test_the_cause_of_a_raising_policy_is_kept() -> None:
    cause = KeyError("scores")
    with pytest.raises(PolicyError) as caught:
        ask(as_policy(Returning(cause)), a_view(), 1)
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize(
    "policy", [H2OPlus(10, n_sink=2, n_recent=3), Returning(everywhere(0, 1, 2)), Returning(IndexError("x"))]
)
def test_too_few_entries_name_what_protects_the_others(policy: Any) -> None:
    # 10 used: 2 sinks, 2 pinned (positions 1 to 3, of which 1 is a sink), 3 recent; 3 remain.
    with pytest.raises(BudgetError, match="only 3 of 10 may: 2 are sinks, 2 pinned, 3 recent") as caught:
        ask(as_policy(policy), a_view(pins=((1, 4),)), 4)
    error = caught.value
    assert (error.n_sink, error.n_pinned, error.n_recent, error.n_protected) == (2, 2, 3, 7)
    assert "by 1 or more" in str(error)


def a_view_behind_a_recall(*cells: int) -> CacheView:
    recalled = np.zeros((2, 2, 12), np.bool_)
    recalled[..., list(cells)] = True
    return replace(a_view(), recalled=recalled)


def test_an_error_of_the_policys_own_behind_a_recall_is_told_at_once() -> None:
    """Evictable are 2 to 6; of the others than 5 and 6, three are enough."""
    policy = Returning(ZeroDivisionError("mine"))
    with pytest.raises(PolicyError, match="it raised ZeroDivisionError: mine"):
        ask(as_policy(policy), a_view_behind_a_recall(5, 6), 3)
    assert policy.seen == [2], "asked once"
    policy = Returning(everywhere(2, 3, 3))
    with pytest.raises(PolicyError, match="named twice"):
        ask(as_policy(policy), a_view_behind_a_recall(5, 6), 3)
    assert policy.seen == [2]


@pytest.mark.parametrize("answer", [IndexError("x"), everywhere(2, 3, 4, 7), everywhere(2, 3, 4, 5)])
def test_it_is_asked_again_where_sparing_what_was_recalled_leaves_too_few(answer: Any) -> None:
    policy = Returning(answer)
    with suppress(PolicyError):
        ask(as_policy(policy), a_view_behind_a_recall(5, 6), 4)
    assert policy.seen == [2, 0]


def test_a_policy_that_does_not_look_at_what_was_recalled_may_evict_it() -> None:
    policy = Returning(everywhere(2, 6))
    victims = ask(as_policy(policy), a_view_behind_a_recall(5, 6), 2)
    assert victims[1, 1].tolist() == [2, 6] and policy.seen == [2]


def test_traces_without_a_method_that_makes_them_are_refused() -> None:
    class Forgetful(FromANotebook):
        n_trace = 2

    with pytest.raises(OptionError, match=r"n_trace of 2, but no method observe"):
        as_policy(Forgetful())
