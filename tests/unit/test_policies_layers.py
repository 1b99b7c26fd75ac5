"""Budgets by layer: who is asked for which layer, and how PyramidKV splits a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.policies import LayerBudgets, Streaming, as_policy, ask, pyramid
from h2o_gguf.view import CacheView


def view_of(layer_ids: tuple[int, ...], n_used: int = 40, n_head_kv: int = 2) -> CacheView:
    shape = (len(layer_ids), n_head_kv, 64)
    pos = np.full(shape, -1, np.int32)
    pos[..., :n_used] = np.arange(n_used)
    scores = np.random.default_rng(1).random(shape, np.float32)
    return CacheView(scores, pos, n_past=n_used, n_used=n_used, layer_ids=layer_ids)


@pytest.mark.parametrize("name", ["h2o+", "h2o", "streaming"])
def test_each_layer_is_evicted_as_by_its_budgets_policy_alone(name: str) -> None:
    """Recent windows follow from the budget, so policies of two budgets name other victims."""
    by_layer = LayerBudgets([32, 16, 32], name, {"n_sink": 2})
    for layers, budget in (((0, 2), 32), ((1,), 16)):
        view = view_of(layers)
        alone = LayerBudgets([budget], name, {"n_sink": 2}).parts[budget]
        assert alone.budget == budget
        assert np.array_equal(ask(by_layer, view, 8), alone.victims(view, 8))


def test_a_function_makes_the_policy_of_each_budget() -> None:
    made = []

    def make(budget: int) -> Streaming:
        made.append(budget)
        return Streaming(budget, n_sink=budget // 8)

    policy = LayerBudgets([24, 8, 8, 16], make)
    assert sorted(made) == [8, 16, 24], "once a budget"
    assert (policy.budget, policy.n_sink, policy.n_recent) == (24, 1, 3)
    assert policy.name == "streaming by layer"
    assert as_policy(policy) is policy, "it has all a policy has"


def test_a_view_of_layers_with_different_budgets_is_refused() -> None:
    policy = LayerBudgets([32, 16])
    with pytest.raises(OptionError, match=r"layers 0, 1 share a cache .* 32, 16"):
        policy.victims(view_of((0, 1)), 4)
    with pytest.raises(OptionError, match="layers 7 share"):
        policy.victims(view_of((7,)), 4)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: LayerBudgets([]), OptionError, "0 budgets"),
        (lambda: LayerBudgets([8, 0]), BudgetError, "the budget is 0"),
        (lambda: LayerBudgets([8, 8], layers=[3]), OptionError, "2 budgets for 1 layers"),
        (lambda: LayerBudgets([8, 8], layers=[3, 3]), OptionError, "2 budgets for 1 layers"),
        (lambda: LayerBudgets([8], "nobody"), OptionError, "nobody"),
        (lambda: LayerBudgets([8], "streaming", {"depth": 1}), OptionError, "depth"),
        (lambda: LayerBudgets([8], Streaming, {"n_sink": 1}), OptionError, "by name"),
        (lambda: LayerBudgets([8], lambda budget: Streaming(budget + 1)), OptionError, "budget of 9 for 8"),
        (lambda: LayerBudgets([8], "streaming", {"n_sink": 9}), BudgetError, "9 entries"),
        (lambda: LayerBudgets([8, 9]).for_layers([0, 1, 2]), OptionError, "2 budgets, but .* 3 layers"),
        (lambda: LayerBudgets([8], layers=[1]).for_layers([0]), OptionError, r"1 layers .*\(0\)"),
    ],
)
def test_budgets_that_fit_no_model_are_refused(
    make: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make()


def test_budgets_are_of_the_layers_that_are_evicted_from() -> None:
    assert LayerBudgets([32, 16]).budget_of == {0: 32, 1: 16}
    assert LayerBudgets([32, 16]).for_layers((5, 11)).budget_of == {5: 32, 11: 16}
    assert LayerBudgets([32, 16], layers=(11, 5)).for_layers((5, 11)).budget_of == {11: 32, 5: 16}


def test_a_pyramid_of_one_layer_a_class_is_the_papers_line() -> None:
    """B = 100, w = 20: m = 80, low = 80/20 = 4, high = 2 * 80 - 4 = 156; 156, 80, 4 plus w."""
    assert pyramid(3, 100, 20, n_classes=3) == (176, 100, 24)
    assert pyramid(5, 100, 20, n_classes=5) == (176, 138, 100, 62, 24)


def test_a_pyramid_of_classes_takes_the_mean_of_each() -> None:
    """B = 40, beta = 2: 60 to 20 in steps of 40/7, the halves' means 40 +- 80/7 = 51.4 and 28.6.

    Cut to 51 and 28, they leave 4 of the 320 entries, one for each layer of the first half.
    """
    assert pyramid(8, 40, beta=2, n_classes=2) == (52,) * 4 + (28,) * 4


@given(
    n_layer=st.integers(1, 64),
    mean=st.integers(1, 4096),
    data=st.data(),
    beta=st.floats(1, 50),
    n_classes=st.integers(1, 8),
)
def test_a_pyramid_falls_and_keeps_the_mean(
    n_layer: int, mean: int, data: st.DataObject, beta: float, n_classes: int
) -> None:
    n_recent = data.draw(st.integers(0, mean))
    budgets = pyramid(n_layer, mean, n_recent, beta, n_classes)
    assert len(budgets) == n_layer
    assert list(budgets) == sorted(budgets, reverse=True)
    assert min(budgets) >= max(1, n_recent)
    assert len(set(budgets)) <= n_classes
    assert mean - 1 < np.mean(budgets) <= mean


@pytest.mark.parametrize(
    "numbers",
    [(0, 8), (4, 0), (4, 8, 9), (4, 8, -1), (4, 8, 0, 0.5), (4, 8, 0, float("nan")), (4, 8, 0, 20, 0)],
)
def test_a_pyramid_of_nonsense_is_refused(numbers: tuple[Any, ...]) -> None:
    with pytest.raises((BudgetError, OptionError)):
        pyramid(*numbers)
