"""Budgets by layer: who is asked for which layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.policies import LayerBudgets, Streaming, as_policy, ask
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
