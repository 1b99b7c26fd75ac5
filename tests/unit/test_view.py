"""The view: read-only, and its masks and counts equal the plain loops."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_gguf.view import CacheView


def view_of(
    pos: list[int], n_past: int, decay: float = 1.0, pins: tuple[tuple[int, int], ...] = ()
) -> CacheView:
    cells = np.array([[pos]], np.int32)
    return CacheView(
        np.zeros(cells.shape, np.float32), cells, n_past, sum(p >= 0 for p in pos), decay, pins=pins
    )


def test_arrays_are_read_only_and_the_callers_stay_writable() -> None:
    pos = np.arange(4, dtype=np.int32).reshape(1, 1, 4)
    scores = np.zeros((1, 1, 4), np.float32)
    view = CacheView(scores, pos, 4, 4)
    with pytest.raises(ValueError, match="read-only"):
        view.pos[0, 0, 0] = 9
    with pytest.raises(ValueError, match="read-only"):
        view.scores[0, 0, 0] = 9
    with pytest.raises(dataclasses.FrozenInstanceError):
        view.n_past = 5  # type: ignore[misc]
    assert pos.flags.writeable
    assert scores.flags.writeable
    assert np.shares_memory(view.scores, scores)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match=r"\(1, 1, 3\)"):
        CacheView(np.zeros((1, 1, 4), np.float32), np.zeros((1, 1, 3), np.int32), 4, 4)


def test_layer_ids_default_to_the_rows() -> None:
    assert CacheView(np.zeros((3, 1, 2), np.float32), np.zeros((3, 1, 2), np.int32), 1, 1).layer_ids == (
        0,
        1,
        2,
    )


@given(
    pos=st.lists(st.integers(-1, 30), min_size=1, max_size=20),
    n_past=st.integers(0, 32),
    n_sink=st.integers(0, 8),
    n_recent=st.integers(0, 8),
    pins=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=3),
)
def test_evictable_is_neither_empty_sink_recent_nor_pinned(
    pos: list[int], n_past: int, n_sink: int, n_recent: int, pins: list[tuple[int, int]]
) -> None:
    expected = [
        p >= 0 and p >= n_sink and p < n_past - n_recent and not any(a <= p < b for a, b in pins) for p in pos
    ]
    assert view_of(pos, n_past, pins=tuple(pins)).evictable(n_sink, n_recent)[0, 0].tolist() == expected


def test_evictable_of_some_cells_is_what_it_is_of_all() -> None:
    rng = np.random.default_rng(3)
    pos = rng.permuted(np.tile(np.arange(-1, 19), (3, 2, 1)), axis=-1).astype(np.int32)
    view = CacheView(np.zeros(pos.shape, np.float32), pos, 19, 19, pins=((5, 8),))
    cells = rng.integers(0, 20, (3, 2, 50))
    expected = np.take_along_axis(view.evictable(2, 3), cells, axis=-1)
    np.testing.assert_array_equal(view.evictable(2, 3, cells), expected)


def test_pins_are_half_open_and_never_hold_empty_cells() -> None:
    assert view_of([-1, 3, 4, 6, 7], 8, pins=((-2, 0), (4, 7))).pinned()[0, 0].tolist() == [
        False,
        False,
        True,
        True,
        False,
    ]


@given(
    decay=st.sampled_from([0.0, 0.25, 0.9, 0.999, 1.0 - 1e-7, 1.0]),
    n_past=st.integers(1, 400),
    data=st.data(),
)
def test_queries_seen_equals_the_explicit_sum(decay: float, n_past: int, data: st.DataObject) -> None:
    p = data.draw(st.integers(0, n_past - 1))
    expected = sum(decay ** (n_past - 1 - query) for query in range(p, n_past))
    assert view_of([p], n_past, decay).queries_seen()[0, 0, 0] == pytest.approx(expected, rel=1e-6)


def test_queries_seen_is_every_entrys_own() -> None:
    pos = np.random.default_rng(4).permutation(24).reshape(3, 2, 4).astype(np.int32)
    seen = CacheView(np.zeros(pos.shape, np.float32), pos, 24, 4, decay=0.5).queries_seen()
    assert seen == pytest.approx(2 - 0.5 ** (23 - pos), rel=1e-6)


def test_queries_seen_saturates_where_float32_does() -> None:
    seen = view_of([0, 999_999, -1], 1_000_000, decay=0.999).queries_seen()[0, 0]
    assert seen == pytest.approx([1000.0, 1.0, 1000.0], rel=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.999, 1.0])
def test_queries_seen_is_at_least_one_in_an_empty_cache(decay: float) -> None:
    assert (view_of([-1, -1], 0, decay).queries_seen() == 1.0).all()


def test_a_score_divided_by_queries_seen_is_the_rate() -> None:
    decay, n_past, mass = 0.99, 300, 0.125
    scores = np.zeros(n_past)
    for query in range(n_past):
        scores *= decay
        scores[: query + 1] += mass
    view = view_of(list(range(n_past)), n_past, decay)
    assert scores / view.queries_seen()[0, 0] == pytest.approx(np.full(n_past, mass), rel=1e-6)
