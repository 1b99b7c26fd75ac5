"""How a budget is split over layers: PyramidKV's line, the least loss, and what users say of it."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.layer_budgets import read_layer_budgets
from h2o_gguf.policies import LayerBudgets, LeastLoss, Pyramid, SnapKV, Split, make, pyramid

LAYERS = (3, 5, 9)


def least(mean: int, losses: Any, budgets: tuple[int, ...] = (1, 2, 3)) -> tuple[int, ...]:
    split = LeastLoss(mean, LAYERS[: len(losses)], budgets, tuple(map(tuple, losses)), n_classes=9)
    assert isinstance(split, Split)
    return split.over(split.layers, 0)


def test_a_pyramid_of_one_layer_a_class_is_the_papers_line() -> None:
    """B = 100, w = 20: m = 80, low = 80/20 = 4, high = 2 * 80 - 4 = 156; 156, 80, 4 plus w."""
    assert pyramid(3, 100, 20, n_classes=3) == (176, 100, 24)
    assert pyramid(5, 100, 20, n_classes=5) == (176, 138, 100, 62, 24)
    assert Pyramid(100, n_classes=3).over(LAYERS, 20) == (176, 100, 24)


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


def test_entries_go_where_they_save_most() -> None:
    """From 1 entry each, three more: 5 and 4 saved by the second and third of the first layer, 3 by the
    second of the last."""
    assert least(2, [[9, 4, 0], [1, 0.5, 0], [3, 0, 0]]) == (3, 1, 2)


def test_a_late_large_saving_is_worth_waiting_for() -> None:
    """The first layer's next entry saves nothing, but both together 10, which is more than the other's 4."""
    assert least(2, [[10, 10, 0], [4, 0, 0]]) == (3, 1)


@settings(max_examples=50, deadline=None)
@given(data=st.data(), mean=st.integers(1, 6))
def test_the_least_loss_is_that_of_all_splits(data: st.DataObject, mean: int) -> None:
    """Losses that fall ever slower, at budgets 1 to 6: compared with every split there is."""
    falls = [
        sorted((data.draw(st.integers(0, 9)) for _ in range(5)), reverse=True) for _ in LAYERS
    ]  # what each further entry saves
    losses = np.array([[sum(row[i:]) for i in range(6)] for row in falls], float)
    chosen = least(mean, losses, (1, 2, 3, 4, 5, 6))
    loss = min(
        sum(losses[row, budget - 1] for row, budget in enumerate(split))
        for split in product(range(1, 7), repeat=len(LAYERS))
        if sum(split) <= mean * len(LAYERS)
    )
    assert sum(chosen) == mean * len(LAYERS)
    assert sum(losses[row, budget - 1] for row, budget in enumerate(chosen)) == loss


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_split_of_losses_keeps_mean_floor_and_classes(data: st.DataObject) -> None:
    n_layer, n_classes = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 4))
    loss = st.lists(st.floats(0, 2), min_size=4, max_size=4).map(tuple)
    losses = tuple(data.draw(loss) for _ in range(n_layer))
    mean, floor = data.draw(st.integers(8, 512)), data.draw(st.integers(0, 40))
    budgets = LeastLoss(mean, tuple(range(n_layer)), (8, 64, 128, 512), losses, n_classes).over(
        range(n_layer), floor
    )
    assert mean - 1 < np.mean(budgets) <= mean
    assert min(budgets) >= min(mean, max(8, floor))
    assert max(budgets) <= 512 + 1  # what rounding leaves
    assert len(set(budgets)) <= n_classes


@pytest.mark.parametrize(
    ("make_split", "error", "words"),
    [
        (lambda: LeastLoss(2, (0,), (1, 3), ((1.0,),)), OptionError, "losses of 1 layers do not fit 1 .* 2"),
        (lambda: LeastLoss(2, (0, 1), (1, 3), ((1.0, 0.0),)), OptionError, "do not fit 2 layers"),
        (lambda: LeastLoss(2, (0,), (3, 3), ((1.0, 0.0),)), OptionError, "rising"),
        (lambda: LeastLoss(2, (0,), (1, 3), ((1.0, float("nan")),)), OptionError, "0 or more"),
        (lambda: LeastLoss(4, (0,), (1, 3), ((1.0, 0.0),)), BudgetError, "up to a budget of 3 .* be 4"),
        (lambda: LeastLoss(2, (0,), (1, 3), ((1.0, 0.0),)).over((1,), 0), OptionError, "layers 0, .* 1: cal"),
        (lambda: Pyramid(8, beta=0.5), OptionError, "beta 0.5"),
        (lambda: LayerBudgets(Pyramid(8), layers=[0]), OptionError, "leave layers out"),
    ],
)
def test_splits_that_make_no_sense_are_refused(make_split: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make_split()


def test_a_split_becomes_budgets_when_the_layers_are_known() -> None:
    """No entries are protected by random: B = 100, low = 5, high = 195."""
    policy = LayerBudgets(Pyramid(100, n_classes=3), "random")
    assert (policy.budget, policy.budget_of) == (100, {})
    known = policy.for_layers(LAYERS)
    assert (known.budget, known.budget_of) == (195, {3: 195, 5: 100, 9: 5})
    assert known.for_layers(LAYERS) == known
    assert known.at_most(120).budget_of == {3: 120, 5: 100, 9: 5}


def test_pyramidkv_is_snapkv_with_the_pyramid_beside_its_window() -> None:
    """w = 32 and B = 112: m = 80, low 4, high 156."""
    policy = make("pyramidkv", 112, n_observed=32, n_classes=3)
    assert isinstance(policy, LayerBudgets)
    assert (policy.name, policy.budget, policy.n_observed) == ("pyramidkv", 112, 32)
    known = policy.for_layers(LAYERS)
    assert known.name == "pyramidkv"
    assert known.budget_of == {3: 188, 5: 112, 9: 36}
    assert all(isinstance(part, SnapKV) for part in known.parts.values())


@pytest.mark.parametrize(
    ("name", "knobs", "floor"),
    [
        ("h2o+", {}, 4),  # its window grows with the budget
        ("h2o+", {"n_recent": 20}, 24),
        ("h2o", {}, 0),
        ("snapkv", {"n_observed": 16}, 16),
        ("tova", {}, 1),
    ],
)
def test_what_a_policy_protects_is_taken_out_before_the_rest_is_split(
    name: str, knobs: dict[str, int], floor: int
) -> None:
    split = Pyramid(100, n_classes=3)
    known = LayerBudgets(split, name, knobs).for_layers(LAYERS)
    assert tuple(known.budget_of.values()) == split.over(LAYERS, floor)


def test_a_layer_too_small_for_its_window_is_named_with_the_mean() -> None:
    with pytest.raises(BudgetError, match=r"mean of 60 entries, some layers get 20: 34 entries .* protected"):
        LayerBudgets([100, 20], "h2o+", {"n_recent": 30})


def test_what_users_say_of_budgets_by_layer() -> None:
    assert read_layer_budgets("512") == (512,)
    assert read_layer_budgets("64, 32,16") == (64, 32, 16)
    assert read_layer_budgets([64, 32]) == (64, 32)
    for said, beta in (("pyramid", 20), ("pyramid:2", 2), ("pyramid:1.5", 1.5)):
        split: Any = read_layer_budgets(said)
        assert split(300) == Pyramid(300, beta)


@pytest.mark.parametrize("said", ["pyramids", "64,x", "-1", "Pyramid"])
def test_what_is_no_split_is_taken_for_a_file(said: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"cannot read .* can be pyramid, pyramid:BETA"):
        read_layer_budgets(said)


@pytest.mark.parametrize("said", ["pyramid:", "pyramid:x", "pyramid:0", "pyramid:inf", "pyramid:nan"])
def test_a_pyramid_without_a_slope_is_refused(said: str) -> None:
    with pytest.raises(OptionError, match="how steep"):
        read_layer_budgets(said)
