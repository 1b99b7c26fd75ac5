"""What a caller asks for becomes sizes that work, or an error with numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models.headers import header

from h2o_gguf.cache_options import CacheOptions
from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.models.shape import shape_of
from h2o_gguf.pins import check_pins
from h2o_gguf.policies import H2O, LayerBudgets, Pyramid, make
from h2o_gguf.sizes import Sizes, plan_model_sizes, plan_sizes

TRAIN = 8192


def plan(n_ctx_train: int = TRAIN, can_renumber: bool = True, **options: Any) -> Sizes:
    return plan_sizes(CacheOptions(**options), n_ctx_train, can_renumber=can_renumber)


def budget(sizes: Sizes) -> int:
    assert sizes.policy is not None
    return sizes.policy.budget


def test_by_default_all_of_the_models_context_is_kept_beside_a_batch() -> None:
    sizes = plan()
    assert (budget(sizes), sizes.n_ubatch, sizes.n_cells, sizes.n_pos_max) == (TRAIN - 512, 512, TRAIN, TRAIN)


def test_a_context_alone_is_the_budget() -> None:
    sizes = plan(n_ctx=2048)
    assert (budget(sizes), sizes.n_cells) == (2048, 2560)


def test_cells_are_budget_and_batch_rounded_up_to_256() -> None:
    sizes = plan(kv_budget=1000, n_batch=100)
    assert (sizes.n_ubatch, sizes.n_cells) == (100, 1280)
    assert plan(kv_budget=192, n_batch=16).n_cells == 256, "the block of 64 counts where it is larger"


def test_a_small_budget_gets_a_small_batch() -> None:
    assert plan(kv_budget=256).n_ubatch == 256
    assert plan(kv_budget=8).n_ubatch == 32


def test_ratios_are_shares_of_the_context() -> None:
    sizes = plan(n_ctx=4000, heavy_ratio=0.1, recent_ratio=0.15)
    assert sizes.policy is not None
    assert (sizes.policy.budget, sizes.policy.n_recent) == (1000, 600)


@pytest.mark.parametrize(("policy", "n_sink"), [("h2o+", 4), ("h2o", 0), ("streaming", 4), ("random", 0)])
def test_the_recent_share_gives_way_to_the_policys_own_sinks(policy: str, n_sink: int) -> None:
    sizes = plan(policy=policy, n_ctx=200, heavy_ratio=0.01, recent_ratio=0.5)
    assert sizes.policy is not None
    assert (sizes.policy.budget, sizes.policy.n_sink) == (102, n_sink)
    assert sizes.policy.n_recent == min(100, 102 - n_sink)


def test_ratios_too_small_for_the_sinks_are_refused_by_their_name() -> None:
    with pytest.raises(BudgetError, match=r"heavy_ratio 0\.01 and recent_ratio 0\.0 .* 4 sinks"):
        plan(n_ctx=200, heavy_ratio=0.01, recent_ratio=0.0)


def test_the_smaller_of_the_two_batch_sizes_counts() -> None:
    assert plan(kv_budget=1024, n_batch=512, n_ubatch=128).n_ubatch == 128
    assert plan(kv_budget=1024, n_batch=64, n_ubatch=128).n_ubatch == 64


def test_a_smaller_context_is_a_smaller_window_of_positions() -> None:
    assert plan(n_ctx=4096, kv_budget=512).n_pos_max == 4096
    assert plan(n_ctx=300, kv_budget=256).n_pos_max == 512, "but never smaller than budget and batch"


def test_a_budget_near_the_models_context_gets_a_smaller_batch() -> None:
    sizes = plan(kv_budget=8000)
    assert (budget(sizes), sizes.n_ubatch, sizes.n_pos_max) == (8000, 192, TRAIN)


@pytest.mark.parametrize("options", [{"kv_budget": 8192}, {"kv_budget": 8000, "n_batch": 512}])
def test_a_budget_that_leaves_no_room_for_a_batch_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(BudgetError, match="8192 positions"):
        plan(**options)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"kv_budget": 8192}, "lower kv_budget to 8191"),
        ({"kv_budget": 8000, "n_batch": 512}, "lower kv_budget to 7680, or n_batch to 192"),
        ({"kv_budget": 8000, "n_ubatch": 512}, "lower kv_budget to 7680, or n_ubatch to 192"),
        ({"kv_budget": 4000, "n_batch": 100_000}, "lower n_batch to 4192"),
    ],
)
def test_what_to_lower_is_named_with_a_number_that_is_taken(options: dict[str, int], hint: str) -> None:
    with pytest.raises(BudgetError) as caught:
        plan(**options)
    assert str(caught.value).endswith(hint)
    for name, value in re.findall(r"(\w+) to (\d+)", hint):
        plan(**{**options, name: int(value)})


def test_learned_positions_need_no_room_beside_the_budget() -> None:
    sizes = plan(1024, can_renumber=False)
    assert (budget(sizes), sizes.n_pos_max) == (1024, 1024)
    assert budget(plan(1024, can_renumber=False, n_ctx=4096)) == 1024


def test_a_sliding_window_and_a_batch_fit_the_cells() -> None:
    def sizes(**options: Any) -> Sizes:
        return plan_sizes(CacheOptions(**options), TRAIN, n_swa=512)

    assert (sizes(kv_budget=384).n_cells, sizes(kv_budget=384).n_ubatch) == (768, 256)
    assert (sizes(kv_budget=64).n_cells, sizes(kv_budget=64).n_ubatch) == (768, 64)
    assert sizes(kv_budget=384, n_batch=384).n_cells == 1024, "a batch that was asked for stays"
    assert sizes(kv_budget=2048).n_cells == 2560, "where there is room nothing changes"


def test_without_eviction_the_context_is_the_limit() -> None:
    sizes = plan(policy="none", n_ctx=300)
    assert (sizes.policy, sizes.n_ctx, sizes.n_ubatch) == (None, 300, 300)
    assert plan(policy=None).n_ctx == TRAIN
    assert plan(policy=make("none", budget=300)).n_cells == 300
    with pytest.raises(OptionError, match="n_ctx 400 contradicts the policy's budget 300"):
        plan(policy=make("none", budget=300), n_ctx=400)


@pytest.mark.parametrize("name", ["kv_budget", "heavy_ratio", "n_sink", "n_recent", "granularity"])
def test_options_of_eviction_are_refused_without_eviction(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        plan(policy="none", **{name: "head" if name == "granularity" else 0.1 if "ratio" in name else 8})


@pytest.mark.parametrize("n_sink", [62, 63, 64, 100])
def test_sinks_close_to_the_budget_run_or_are_refused_with_numbers(n_sink: int) -> None:
    try:
        sizes = plan(kv_budget=64, n_sink=n_sink)
    except BudgetError as error:
        assert (error.budget, error.n_sink) == (64, n_sink)
        assert n_sink > 64
    else:
        assert sizes.policy is not None and sizes.policy.n_sink == n_sink <= 64


def test_a_policy_object_brings_its_own_numbers() -> None:
    policy = H2O(budget=200, n_recent=50)
    assert plan(policy=policy).policy == policy
    assert plan(policy=policy, kv_budget=200).policy == policy
    with pytest.raises(OptionError, match="contradicts"):
        plan(policy=policy, kv_budget=100)
    with pytest.raises(OptionError, match="n_sink"):
        plan(policy=policy, n_sink=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_ctx", -1),
        ("n_batch", 0),
        ("kv_block", 0),
        ("n_ubatch", "many"),
        *((name, n) for name in ("n_ctx", "n_batch", "n_ubatch", "kv_block") for n in (2**31, 2**32, 2**64)),
    ],
)
def test_illegal_sizes_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        plan(**{name: value})


@pytest.mark.parametrize("policy", ["h2o+", None])
def test_the_longest_context_of_all_has_cells_that_can_be_counted(policy: str | None) -> None:
    for n_ctx in (0, 2**31 - 256):
        sizes = plan(2**31 - 1, policy=policy, n_ctx=n_ctx)
        assert sizes.n_cells == 2**31 - 256 and sizes.n_ctx == sizes.n_cells


@given(
    n_ctx_train=st.integers(64, 40_000),
    n_ctx=st.just(0) | st.integers(8, 40_000),
    kv_budget=st.none() | st.integers(1, 40_000),
    n_batch=st.none() | st.integers(1, 4096),
    kv_block=st.integers(1, 256),
)
def test_sizes_always_hold_a_batch_beside_the_budget(
    n_ctx_train: int, n_ctx: int, kv_budget: int | None, n_batch: int | None, kv_block: int
) -> None:
    try:
        sizes = plan(n_ctx_train, n_ctx=n_ctx, kv_budget=kv_budget, n_batch=n_batch, kv_block=kv_block)
    except BudgetError:
        assert kv_budget is not None
        return
    room = max(sizes.n_ubatch, sizes.block)
    assert budget(sizes) >= 1 and sizes.n_ubatch >= 1
    assert budget(sizes) + room <= sizes.n_cells
    assert budget(sizes) + room <= sizes.n_pos_max <= n_ctx_train
    assert kv_budget is None or budget(sizes) == kv_budget
    assert n_batch is None or sizes.n_ubatch <= n_batch


def test_h2o_plus_is_the_default_only_while_nothing_is_asked_for() -> None:
    assert CacheOptions().is_default and CacheOptions(n_ctx=100).is_default
    assert not CacheOptions(kv_budget=100).is_default
    assert not CacheOptions(policy="h2o").is_default
    assert not CacheOptions(policy=make("none", budget=5)).evicts


def test_only_the_name_none_means_nobody_not_an_object_that_has_it() -> None:
    @dataclass(frozen=True)
    class Mine:
        budget: int = 64
        name: str = "none"

        def victims(self, view: Any, n: int) -> Any:
            raise NotImplementedError

    assert plan(policy=Mine()).policy is not None
    assert not CacheOptions(policy=" None ").evicts


@pytest.mark.parametrize("name", ["h2o+", "h2o", "streaming", "random"])
@pytest.mark.parametrize("n_pinned", [10, 20, 57])
def test_the_budget_that_an_error_about_pins_names_is_taken(name: str, n_pinned: int) -> None:
    for knobs in ({}, {"n_recent": 3}):
        policy = make(name, budget=8, **knobs)
        pins = [(100, 100 + n_pinned)]
        with pytest.raises(BudgetError, match="do not fit") as caught:
            check_pins(pins, policy)
        found = re.search(r"raise kv_budget to (\d+) or more", str(caught.value))
        assert found is not None
        check_pins(pins, make(name, budget=int(found[1]), **knobs))


def test_budgets_by_layer_size_the_cache_of_each_layer() -> None:
    """Each layer's budget and the larger of batch and block; the context has room for the largest."""
    shape = shape_of(header("gemma2", attention__sliding_window=64))  # every second of 12 layers has a window
    budgets = [700, 700, 300, 300, 100, 100]
    sizes = plan_model_sizes(CacheOptions(policy=LayerBudgets(budgets), n_batch=32), shape)
    assert sizes.layer_cells == tuple(n for budget in budgets for n in (0, budget + 64)), (
        "none for layers with a window"
    )
    assert (sizes.n_ubatch, sizes.n_cells) == (32, 768)
    alike = plan_model_sizes(CacheOptions(policy=make("h2o+", 700), n_batch=32), shape)
    assert (alike.layer_cells, alike.n_cells) == ((), 768)


LINES = partial(Pyramid, n_classes=6)  # of 6 layers


def of_gemma2(**options: Any) -> Sizes:
    """Six of the twelve layers have a window."""
    shape = shape_of(header("gemma2", attention__sliding_window=64))
    return plan_model_sizes(CacheOptions(n_batch=32, **options), shape)


def test_a_split_of_the_budget_sizes_each_layers_cache() -> None:
    """B = 104, 4 of them sinks: m = 100, from 195 to 5 in steps of 38."""
    sizes = of_gemma2(kv_budget=104, layer_budgets=LINES)
    assert isinstance(sizes.policy, LayerBudgets) and sizes.policy.name == "h2o+ by layer"
    budgets = [199, 161, 123, 85, 47, 9]
    assert list(sizes.policy.budget_of.values()) == budgets
    assert sizes.layer_cells == tuple(n for budget in budgets for n in (0, budget + 64))
    listed = of_gemma2(layer_budgets=tuple(budgets))
    assert listed.layer_cells == sizes.layer_cells


def test_pyramidkv_by_name_has_budgets_by_layer() -> None:
    sizes = of_gemma2(policy="pyramidkv", kv_budget=132)
    assert isinstance(sizes.policy, LayerBudgets) and sizes.policy.name == "pyramidkv"
    budgets = list(sizes.policy.budget_of.values())
    assert budgets[0] > budgets[-1] >= 32 and sum(budgets) <= 6 * 132
    flat = of_gemma2(policy="pyramidkv")
    assert isinstance(flat.policy, LayerBudgets)
    assert max(flat.policy.budgets) == 4096 - 64, "without a budget no layer has more than positions"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"layer_budgets": LINES}, OptionError, "splits a mean budget, and there is none"),
        ({"layer_budgets": (9,) * 6, "kv_budget": 9}, OptionError, "one for all: give one"),
        ({"layer_budgets": (9, 9)}, OptionError, "2 budgets for 6 layers"),
        ({"layer_budgets": LINES, "kv_budget": 9, "policy": H2O(9)}, OptionError, "policy object both"),
        ({"layer_budgets": LINES, "policy": None}, OptionError, "layer_budgets needs a policy"),
        ({"layer_budgets": LINES, "kv_budget": 99, "policy": "pyramidkv"}, OptionError, "by itself"),
        ({"layer_budgets": LINES, "kv_budget": 60, "n_recent": 60}, BudgetError, "64 entries"),
        ({"layer_budgets": (300, 10) * 3, "n_recent": 20}, BudgetError, "mean of 155 .* some layers get 10"),
    ],
)
def test_splits_that_contradict_the_rest_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        of_gemma2(**options)


def test_a_mean_whose_largest_layer_has_no_positions_names_one_that_has() -> None:
    with pytest.raises(BudgetError, match="4096 positions") as caught:
        of_gemma2(kv_budget=4000, layer_budgets=LINES)
    found = re.search(r"kv_budget to (\d+)", str(caught.value))
    assert found is not None
    assert of_gemma2(kv_budget=int(found[1]), layer_budgets=LINES).policy is not None


def test_pins_must_fit_every_layers_budget() -> None:
    policy = LayerBudgets([64, 16, 64], "streaming", {"n_sink": 2})
    assert check_pins([(0, 9)], policy) == ((0, 9),)
    with pytest.raises(BudgetError, match="a budget of 16"):
        check_pins([(0, 12)], policy)
