"""Native work on rows of cells gives what the plain reference gives."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_gguf.bindings.rows import NativeRows
from h2o_gguf.errors import BudgetError, PolicyError
from h2o_gguf.policies import select_highest, select_lowest
from h2o_gguf.rows import PlainRows
from h2o_gguf.view import CacheView

SPECIAL = np.array([np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38], np.float32)


def drawn(data: st.DataObject, same_pos: bool) -> tuple[CacheView, Any]:
    """A view, and which of its entries may go."""
    shape = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([1, 9, 300, 1025])),
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    pos = rng.permuted(np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape), axis=-1)
    if same_pos:
        pos[:] = pos[:1, :1]
    scores = (rng.integers(0, data.draw(st.sampled_from([1, 4, 10**6])), shape) / 4).astype(np.float32)
    is_special = rng.random(shape) < data.draw(st.sampled_from([0, 0.2]))
    if not same_pos:  # sums of opposite infinities are NaN
        scores[is_special] = rng.choice(SPECIAL, np.count_nonzero(is_special))
    evictable = rng.random(shape) < data.draw(st.sampled_from([0.1, 0.8, 1.0]))
    if same_pos:
        evictable[:] = evictable[:1, :1]
    return CacheView(scores, pos, shape[-1], shape[-1], 0.97), evictable


@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_the_same_entries_are_chosen(granularity: Any, data: st.DataObject) -> None:
    view, evictable = drawn(data, granularity != "head")
    most = int(np.count_nonzero(evictable, -1).min())
    n = data.draw(st.sampled_from([0, most, most // 2, most // 20]))
    for select in (select_lowest, select_highest):
        chosen = [
            select(replace(view, rows=rows), view.scores, evictable, n, granularity)
            for rows in (NativeRows(), PlainRows())
        ]
        np.testing.assert_array_equal(*chosen)
        with pytest.raises(BudgetError, match=f"only {most} of"):
            select(replace(view, rows=NativeRows()), view.scores, evictable, most + 1, granularity)


@pytest.mark.parametrize("rows", [NativeRows(), PlainRows()], ids=["native", "plain"])
def test_nan_is_refused_where_it_may_go(rows: Any) -> None:
    view = CacheView(
        np.zeros((2, 2, 40), np.float32), np.tile(np.arange(40, dtype=np.int32), (2, 2, 1)), 40, 40
    )
    view, scores, evictable = replace(view, rows=rows), view.scores.copy(), view.pos >= 3
    scores[1, 0, 2:5] = np.nan
    for select in (select_lowest, select_highest):
        with pytest.raises(PolicyError, match="2 scores are NaN"):
            select(view, scores, evictable, 5)
        select(view, scores, evictable & ~np.isnan(scores), 5)


def test_arrays_that_do_not_go_together_are_refused() -> None:
    short, long = np.zeros((1, 1, 4), np.float32), np.zeros((1, 1, 5), np.float32)
    pos, may_go = long.astype(np.int32), long == 0
    for wrong in ((short, pos, may_go), (long, pos[..., :4], may_go), (long, pos, may_go[..., :4])):
        with pytest.raises(ValueError, match="shape"):
            NativeRows().lowest(*wrong, 1)
    with pytest.raises(ValueError, match="shape"):
        NativeRows().carried(short[None], pos, pos)
    with pytest.raises(ValueError, match="n_last"):
        NativeRows().distances(long, 2)


@settings(max_examples=100, deadline=None)
@given(start=st.integers(0, 2**70) | st.integers(0, 40), end=st.integers(0, 2**70) | st.integers(0, 40))
def test_positions_within_two_are_marked(start: int, end: int) -> None:
    pos = np.array([-1, -2, -(2**31), 2**31 - 1, *range(40)], np.int32).reshape(2, -1)
    expected = [[start <= int(each) < end for each in row] for row in pos]
    for rows in (NativeRows(), PlainRows()):
        assert rows.within(pos, start, end).tolist() == expected


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_rates_are_scores_by_queries(data: st.DataObject) -> None:
    view, _ = drawn(data, False)
    view = replace(view, n_past=view.n_past + data.draw(st.sampled_from([0, 10, 10**6])))
    rates = replace(view, rows=NativeRows()).rates()
    np.testing.assert_array_equal(rates, view.rates())
    np.testing.assert_array_equal(rates, view.scores / view.queries_seen())


@settings(max_examples=100, deadline=None)
@given(
    n_was=st.integers(1, 70),
    n_now=st.integers(1, 70),
    seed=st.integers(0, 2**32),
    step=st.sampled_from([1, 2**20]),
)
def test_numbers_follow_their_entries(n_was: int, n_now: int, seed: int, step: int) -> None:
    rng = np.random.default_rng(seed)
    held = np.arange(100, dtype=np.int32) * step
    was, now = (
        np.stack([rng.permutation(held)[:n] for _ in range(6)]).reshape(2, 3, n) for n in (n_was, n_now)
    )
    was[rng.random(was.shape) < 0.2], now[rng.random(now.shape) < 0.2] = -2, -1
    n_same = min(n_was, n_now) // 2
    now[0, :, :n_same] = was[0, :, :n_same]
    now[0, :, n_same:] = -1
    numbers = rng.random((2, *was.shape), np.float32)
    np.testing.assert_array_equal(
        NativeRows().carried(numbers, was, now), PlainRows().carried(numbers, was, now)
    )


def test_distances_are_those_of_the_reference() -> None:
    vectors = np.random.default_rng(2).normal(0.3, size=(2, 3, 40, 24)).astype(np.float32)
    vectors[0, 0, 30] = 0
    for n_last in (0, 7, 40):
        found, expected = (rows.distances(vectors, n_last) for rows in (NativeRows(), PlainRows()))
        np.testing.assert_allclose(found, expected, atol=2e-6)
    assert found[0, 0, 30] == 1


def test_lengths_are_those_of_the_reference() -> None:
    vectors = np.random.default_rng(3).normal(size=(2, 3, 24)).astype(np.float32)
    vectors[1, 2] = 0
    for rows in (NativeRows(), PlainRows()):
        expected = np.linalg.norm(vectors.astype(np.float64), axis=-1)
        np.testing.assert_allclose(rows.lengths(vectors), expected, rtol=1e-6)
