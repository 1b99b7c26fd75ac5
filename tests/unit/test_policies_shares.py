"""Budgets: ratios and defaults become numbers once; illegal ones are refused with the numbers."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from h2o_gguf import policies
from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.policies import H2O, Budget, H2OPlus, Random, check_budget, resolve_budget

EVICTING = [name for name in policies.names() if name != "none"]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, Budget(4096, 4, 2046)),
        ({"kv_budget": 1024}, Budget(1024, 4, 510)),
        ({"kv_budget": 1024, "n_recent": 128}, Budget(1024, 4, 128)),
        ({"heavy_ratio": 0.1, "recent_ratio": 0.1}, Budget(819, 4, 410)),
        ({"heavy_ratio": 0.25}, Budget(2048, 4, 1024)),
        ({"recent_ratio": 0.25}, Budget(2048, 4, 1024)),
        ({"heavy_ratio": 0.25, "n_recent": 100}, Budget(1124, 4, 100)),
        ({"heavy_ratio": 0.7, "recent_ratio": 0.3}, Budget(4096, 4, 1229)),
        ({"heavy_ratio": 0.0, "recent_ratio": 0.5, "n_sink": 0}, Budget(2048, 0, 2048)),
        ({"heavy_ratio": 0.0, "recent_ratio": 0.5}, Budget(2048, 4, 2044)),
    ],
)
def test_shares_become_numbers(asked: dict[str, Any], expected: Budget) -> None:
    assert resolve_budget(4096, **asked) == expected


@pytest.mark.parametrize("ratio", [-0.1, 1.1, math.nan, math.inf, "0.1", True, [0.1]])
@pytest.mark.parametrize("name", ["heavy_ratio", "recent_ratio"])
def test_ratio_outside_zero_to_one_is_refused_by_name(name: str, ratio: Any) -> None:
    with pytest.raises(BudgetError, match=name):
        resolve_budget(4096, **{"heavy_ratio": 0.1, "recent_ratio": 0.1, name: ratio})


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"heavy_ratio": 0.6, "recent_ratio": 0.6}, "1.2 of the context"),
        ({"heavy_ratio": 0.0, "recent_ratio": 0.0}, "less than one entry"),
        ({"heavy_ratio": 0.1, "kv_budget": 512}, "kv_budget 512"),
        ({"recent_ratio": 0.1, "n_recent": 7}, "n_recent 7"),
        ({"kv_budget": 5000}, "budget is 5000 entries but the context has 4096"),
        ({"kv_budget": 512, "n_recent": -1}, "n_recent is -1"),
        ({"kv_budget": 512, "n_sink": -1}, "n_sink is -1"),
        ({"heavy_ratio": 0.001, "recent_ratio": 0.0}, "heavy_ratio 0.001 .* budget of 4 .* 8 sinks"),
        ({"heavy_ratio": 0.001, "n_recent": 100}, "heavy_ratio 0.001 .* budget of 104 .* window of 100"),
    ],
)
def test_contradictions_are_refused_with_the_numbers(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(BudgetError, match=words):
        resolve_budget(4096, **{"n_sink": 8, **asked})


@pytest.mark.parametrize("budget", [0, -1, 2.5, 64.0, "64", None, math.nan, True])
@pytest.mark.parametrize("name", policies.names())
def test_budget_must_be_a_whole_number_above_zero(name: str, budget: Any) -> None:
    with pytest.raises(BudgetError, match="whole number"):
        policies.make(name, budget=budget)


@given(
    n_ctx=st.integers(1, 10_000),
    heavy=st.floats(0, 1),
    recent=st.floats(0, 1),
)
def test_resolved_shares_never_exceed_the_context(n_ctx: int, heavy: float, recent: float) -> None:
    assume(heavy + recent <= 1)
    try:
        found = resolve_budget(n_ctx, heavy_ratio=heavy, recent_ratio=recent, n_sink=0)
    except BudgetError as error:
        assert round((heavy + recent) * n_ctx) == 0, error
    else:
        assert 0 <= found.n_recent <= found.budget <= n_ctx


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("n_sink", [62, 63, 64])
def test_sinks_close_to_the_budget_are_legal(name: str, n_sink: int) -> None:
    policy = policies.make(name, budget=64, n_sink=n_sink)
    assert policy.n_sink + policy.n_recent <= 64


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize(("n_sink", "n_recent"), [(65, 0), (100, -1), (64, 1), (4, 61), (0, 65)])
def test_sinks_and_window_beyond_the_budget_are_refused_with_the_numbers(
    name: str, n_sink: int, n_recent: int
) -> None:
    with pytest.raises(BudgetError, match=f"{n_sink} sinks.* the budget is 64") as caught:
        policies.make(name, budget=64, n_sink=n_sink, n_recent=n_recent)
    assert caught.value.budget == 64
    assert caught.value.n_sink == n_sink
    assert caught.value.n_protected > 64


@given(budget=st.integers(1, 5000), n_sink=st.integers(0, 64))
def test_default_window_is_half_of_what_is_left(budget: int, n_sink: int) -> None:
    assume(n_sink <= budget)
    assert check_budget(budget, n_sink, policies.AUTO).n_recent == (budget - n_sink) // 2


def test_numpy_integers_become_plain_ones() -> None:
    policy = H2O(np.int64(64), n_recent=np.int32(8))
    assert type(policy.budget) is int
    assert repr(policy) == "H2O(budget=64, n_sink=0, n_recent=8, granularity='head')"


@pytest.mark.parametrize("decay", [-0.1, 1.5, math.nan, "1", None, True])
def test_decay_outside_zero_to_one_is_refused(decay: Any) -> None:
    with pytest.raises(OptionError, match="decay"):
        H2OPlus(64, decay=decay)


@pytest.mark.parametrize("seed", [-1, 1.5, "x", None])
def test_seed_must_be_a_whole_number(seed: Any) -> None:
    with pytest.raises(OptionError, match="seed"):
        Random(64, seed=seed)
