"""Policies that ask the newest queries, against plain loops over the papers' formulas."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from observations import lowest, plain_attention, view_of

from h2o_gguf.errors import OptionError
from h2o_gguf.policies import TOVA, DropKV, SnapKV, make
from h2o_gguf.policies.dropkv import output_errors
from h2o_gguf.view import CacheView


@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_of_a_view_is_the_softmax_over_what_a_query_sees(has_sinks: bool) -> None:
    view = view_of(seed=3)
    if has_sinks:
        sink_logits = np.random.default_rng(0).normal(size=(2, 2, 2))
        view = replace(view, observation=replace(view.seen, sink_logits=sink_logits))  # type: ignore[type-var]
    for row in range(2):
        np.testing.assert_allclose(view.attention(row), plain_attention(view, row), rtol=1e-9, atol=1e-12)


def test_tova_evicts_what_the_last_query_gives_least_over_the_heads_of_a_layer() -> None:
    view = view_of(seed=1, n_query=1, n_head_kv=3, same_pos=True)
    victims = TOVA(24, n_recent=0).victims(view, 7)
    for il in range(2):
        mean = plain_attention(view, il)[:, :, -1].mean((0, 1))
        assert [victims[il, ih].tolist() for ih in range(3)] == [lowest(view, mean, il, 0, 7)] * 3


def test_tova_has_the_papers_setting_by_default() -> None:
    policy = TOVA(64)
    assert (policy.n_observed, policy.granularity, policy.n_sink, policy.n_recent) == (1, "layer", 0, 1)


def plain_snapkv(view: CacheView, il: int, ih: int, kernel: int, pooling: str) -> list[float]:
    """Score of each cell; infinite in the observation window."""
    attention = plain_attention(view, il)[ih]
    start = int(view.seen.query_pos[0])
    prefix = [(int(p), c) for c, p in enumerate(view.pos[il, ih]) if 0 <= p < start]
    prefix.sort()
    scores = [float("inf")] * view.shape[-1]
    for at, (_, cell) in enumerate(prefix):
        pooled = 0.0
        for head in attention:
            near = []
            for other in range(at - kernel // 2, at + kernel // 2 + 1):
                if 0 <= other < len(prefix):
                    near.append(sum(query[prefix[other][1]] for query in head) / len(head))
            pooled += max(near) if pooling == "max" else sum(near) / kernel
        scores[cell] = pooled / len(attention)
    return scores


@pytest.mark.parametrize("pooling", ["max", "avg"])
@pytest.mark.parametrize("kernel", [1, 5, 7])
@pytest.mark.parametrize("seed", range(3))
def test_snapkv_pools_the_mean_attention_of_the_window_over_neighbours_by_position(
    pooling: Any, kernel: int, seed: int
) -> None:
    view = view_of(seed=seed, n_query=6)
    policy = SnapKV(24, n_recent=0, n_observed=6, kernel=kernel, pooling=pooling)
    victims = policy.victims(view, 10)
    for il, ih in np.ndindex(2, 2):
        scores = plain_snapkv(view, il, ih, kernel, pooling)
        assert victims[il, ih].tolist() == lowest(view, scores, il, ih, 10)


def test_snapkv_lets_the_window_go_last() -> None:
    view = view_of(n_used=24, n_past=24, n_query=8)
    for name in ("snapkv", "pyramidkv", "dropkv", "r-kv"):
        victims = make(name, 24, n_sink=0, n_recent=0).victims(view, 20)
        kept = np.take_along_axis(view.pos, victims[..., :16], -1)
        assert kept.max() < 16, name


def test_snapkv_keeps_the_whole_budget_of_the_paper() -> None:
    policy = SnapKV(512)
    assert (policy.n_sink, policy.n_recent, policy.n_observed) == (0, 32, 32)
    assert SnapKV(40).n_recent == 20  # a window that leaves room


@pytest.mark.parametrize(
    ("knobs", "name"),
    [({"kernel": 4}, "kernel"), ({"pooling": "min"}, "pooling"), ({"n_observed": 0}, "n_observed")],
)
def test_snapkv_refuses_wrong_knobs_by_name(knobs: dict[str, Any], name: str) -> None:
    with pytest.raises(OptionError) as caught:
        SnapKV(64, **knobs)
    assert caught.value.options == (name,)


def drop_errors(view: CacheView, il: int, ih: int) -> list[float]:
    """How far the outputs move, squared, when an entry is really dropped and the rest renormalised."""
    seen: Any = view.seen
    attention, values = plain_attention(view, il)[ih], seen.v[il, ih]
    errors = []
    for cell in range(view.shape[-1]):
        error = 0.0
        for p in attention.reshape(-1, view.shape[-1]):
            without = p.copy()
            without[cell] = 0
            error += float(np.sum((p @ values - without @ values / (1 - p[cell])) ** 2))
        errors.append(error)
    return errors


@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_dropkv_scores_are_the_error_of_really_dropping_each_entry(spread: float) -> None:
    view = view_of(seed=5, n_query=4, spread=spread)
    for il in range(2):
        errors = output_errors(view, il)
        for ih in range(2):
            np.testing.assert_allclose(errors[ih], drop_errors(view, il, ih), rtol=1e-6, atol=1e-12)


def test_dropkv_is_right_in_float32_where_one_entry_has_nearly_all_attention() -> None:
    view = view_of(n_layer=1, n_head_kv=1, n_query=3, seed=2)
    seen: Any = view.seen
    favourite = int(np.flatnonzero(view.pos[0, 0] == view.pos[0, 0][view.pos[0, 0] >= 0].min())[0])
    q = np.ones_like(seen.q)
    k = seen.k * 0.1
    k[0, 0, favourite] = 5.5  # p = 1 - 5e-6
    exact = replace(view, observation=replace(seen, q=q, k=k))
    low = replace(seen, q=q.astype(np.float32), k=k.astype(np.float32), v=seen.v.astype(np.float32))
    assert plain_attention(exact, 0)[..., favourite].min() > 1 - 1e-5
    errors = output_errors(replace(view, observation=low), 0)[0]
    expected = drop_errors(exact, 0, 0)
    assert errors.dtype == np.float32
    # float32 knows 1 - p to 6e-8 / 5e-6, about 1 %.
    assert errors[favourite] == pytest.approx(expected[favourite], rel=0.015)


def test_dropkv_evicts_the_smallest_errors() -> None:
    view = view_of(seed=8, n_query=4, n_past=60)
    victims = DropKV(24, n_sink=0, n_recent=0, n_observed=4).victims(view, 6)
    for il, ih in np.ndindex(2, 2):
        errors = np.where(view.pos[il, ih] >= 56, np.inf, drop_errors(view, il, ih))
        assert victims[il, ih].tolist() == lowest(view, errors, il, ih, 6)


@pytest.mark.parametrize("name", ["tova", "snapkv", "dropkv", "expected-attention", "r-kv"])
def test_without_recorded_queries_a_policy_still_answers(name: str) -> None:
    view = view_of(n_query=0, same_pos=True)
    assert make(name, 24, n_recent=0).victims(view, 5).shape == (2, 2, 5)


@pytest.mark.parametrize("name", ["snapkv", "dropkv", "expected-attention", "r-kv"])
def test_records_that_are_not_full_yet_count_for_nothing(name: str) -> None:
    """Records before the first token have position -1 and queries of 0."""
    view = view_of(n_used=10, n_past=10, n_query=14)
    seen: Any = view.seen
    shorter = replace(seen, query_pos=seen.query_pos[4:], q=seen.q[:, :, :, 4:])
    policy = make(name, 24, n_sink=0, n_recent=0)
    np.testing.assert_array_equal(
        policy.victims(view, 6), policy.victims(replace(view, observation=shorter), 6)
    )
