"""One matrix of invariants for every registered policy, and the selection against a plain reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from observations import Drawn, drawn

from h2o_gguf import policies
from h2o_gguf.errors import BudgetError, CacheFullError, OptionError, PolicyError
from h2o_gguf.policies import H2O, H2OPlus, Streaming, ask, ask_traces, select_lowest
from h2o_gguf.view import CacheView

EVICTING = [name for name in policies.names() if name != "none"]
GRANULARITIES = ("head", "layer", "token")
POOLED = {"head": (), "layer": (1,), "token": (0, 1)}


@st.composite
def views(draw: st.DrawFn, same_pos: bool = False, decay: float | None = None) -> CacheView:
    n_layer, n_head_kv = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    n_cells = draw(st.one_of(st.integers(4, 40), st.sampled_from([256, 300])))
    n_used = draw(st.integers(1, n_cells))
    n_past = n_used + draw(st.integers(0, 100))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    pos = np.full((n_layer, n_head_kv, n_cells), -1, np.int32)
    for il in range(n_layer):
        for ih in range(n_head_kv):
            cells, kept = rng.permutation(n_cells)[:n_used], rng.permutation(n_past)[:n_used]
            pos[il, ih, cells] = kept
    if same_pos:
        pos[:] = pos[:1, :1]
    # Multiples of 1/4: plenty of ties, and sums over heads are exact whatever their order.
    n_levels = draw(st.sampled_from([1, 3, 1000]))
    scores = np.where(pos >= 0, rng.integers(0, n_levels, pos.shape) / 4, 0).astype(np.float32)
    spans = st.tuples(st.integers(0, n_past), st.integers(0, 6)).map(lambda span: (span[0], sum(span)))
    return CacheView(
        scores,
        pos,
        n_past,
        n_used,
        draw(st.sampled_from([0.9, 0.999, 1.0])) if decay is None else decay,
        pins=tuple(draw(st.lists(spans, max_size=2))),
        observation=drawn(
            pos,
            n_past,
            n_query=draw(st.sampled_from([0, 1, 12])),
            n_group=draw(st.integers(1, 2)),
            spread=draw(st.sampled_from([0.0, 1.0, 30.0])),
            seed=draw(st.integers(0, 99)),
            rotates=draw(st.booleans()),
        ),
        n_unobserved=draw(st.integers(0, n_past)),
        n_prompt=draw(st.integers(0, n_past)),
    )


def observed(policy: Any, view: CacheView) -> CacheView:
    """The view as the policy gets it when it keeps traces."""
    return replace(view, traces=ask_traces(policy, view)) if policy.n_trace else view


@st.composite
def questions(draw: st.DrawFn, name: str, granularity: str = "head") -> tuple[Any, CacheView, int]:
    view = draw(views(same_pos=granularity != "head"))
    n_sink, n_recent = draw(st.integers(0, 5)), draw(st.integers(0, 8))
    policy = policies.make(name, budget=512, n_sink=n_sink, n_recent=n_recent, granularity=granularity)
    room = int(view.evictable(n_sink, n_recent).sum(axis=-1).min())
    return policy, observed(policy, view), draw(st.integers(0, room))


def plain_selection(
    view: CacheView, scores: NDArray[Any], evictable: NDArray[np.bool_], n: int, granularity: str
) -> NDArray[np.int32]:
    """Return what select_lowest must return, one entry at a time."""
    n_layer, n_head_kv, n_cells = view.shape
    victims = np.zeros((n_layer, n_head_kv, n), np.int32)
    for il in range(n_layer):
        for ih in range(n_head_kv):
            layers = range(n_layer) if granularity == "token" else [il]
            heads = [ih] if granularity == "head" else range(n_head_kv)
            pool = [(a, b) for a in layers for b in heads]
            candidates = []
            for cell in range(n_cells):
                if all(evictable[a, b, cell] for a, b in pool):
                    total = sum(float(scores[a, b, cell]) for a, b in pool)
                    candidates.append((total, int(view.pos[il, ih, cell]), cell))
            victims[il, ih] = [cell for _, _, cell in sorted(candidates)[:n]]
    return victims


@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_selection_equals_the_plain_reference(granularity: Any, data: st.DataObject) -> None:
    view = data.draw(views(same_pos=granularity != "head"))
    evictable = view.evictable(data.draw(st.integers(0, 4)), data.draw(st.integers(0, 4)))
    scores = view.scores - np.float32(data.draw(st.sampled_from([0.0, 0.25, 100.0])))
    n = data.draw(st.integers(0, int(evictable.sum(axis=-1).min())))
    expected = plain_selection(view, scores, evictable, n, granularity)
    np.testing.assert_array_equal(select_lowest(view, scores, evictable, n, granularity), expected)


def test_selection_of_many_heads_equals_the_plain_reference() -> None:
    rng = np.random.default_rng(5)
    pos = rng.permuted(np.tile(np.arange(-8, 40), (9, 16, 1)), axis=-1).clip(-1).astype(np.int32)
    view = CacheView(rng.integers(0, 9, pos.shape).astype(np.float32), pos, 40, 40)
    evictable = view.evictable(2, 5)
    expected = plain_selection(view, view.scores, evictable, 7, "head")
    np.testing.assert_array_equal(select_lowest(view, view.scores, evictable, 7), expected)


def test_selection_orders_infinities_negatives_and_both_zeros() -> None:
    scores = np.array([[[np.inf, 0.0, -0.0, -1.5, -np.inf, 1e-45, -1e-45, 3e38]]], np.float32)
    pos = np.array([[[0, 1, 2, 3, 4, 5, 6, 7]]], np.int32)
    view = CacheView(scores, pos, 8, 8)
    assert select_lowest(view, scores, view.evictable(0, 0), 8).ravel().tolist() == [4, 3, 6, 1, 2, 5, 7, 0]


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize("granularity", GRANULARITIES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_victims_are_never_sink_recent_pinned_or_empty_and_n_different_ones(
    name: str, granularity: str, data: st.DataObject
) -> None:
    policy, view, n = data.draw(questions(name, granularity))
    victims = policy.victims(view, n)
    assert victims.dtype == np.int32
    assert victims.shape == (*view.shape[:2], n)
    for il, ih in np.ndindex(*view.shape[:2]):
        positions = view.pos[il, ih][victims[il, ih]].tolist()
        assert len(set(victims[il, ih].tolist())) == n
        assert all(p >= policy.n_sink for p in positions)
        assert all(0 <= p < view.n_past - policy.n_recent for p in positions)
        assert not any(start <= p < end for p in positions for start, end in view.pins)
    if granularity != "head":
        assert all(len({tuple(head) for head in layer}) == 1 for layer in victims.tolist())
    if granularity == "token":
        assert len({tuple(layer[0]) for layer in victims.tolist()}) == 1
    np.testing.assert_array_equal(ask(policy, view, n), victims)


@pytest.mark.parametrize("name", EVICTING)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_same_view_same_answer(name: str, data: st.DataObject) -> None:
    policy, view, n = data.draw(questions(name))
    before = view.scores.copy(), view.pos.copy()
    first = policy.victims(view, n)
    twin = replace(view, scores=before[0], pos=before[1])
    if policy.n_trace:
        np.testing.assert_array_equal(policy.observe(twin), policy.observe(view))
    np.testing.assert_array_equal(replace(policy).victims(twin, n), first)
    np.testing.assert_array_equal(view.scores, before[0])
    np.testing.assert_array_equal(view.pos, before[1])


@pytest.mark.parametrize("name", EVICTING)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_was_recalled_is_spared_where_others_are_enough(name: str, data: st.DataObject) -> None:
    policy, view, n = data.draw(questions(name))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    recalled = (view.pos >= 0) & (rng.random(view.shape) < data.draw(st.sampled_from([0.1, 0.5, 1.0])))
    others = view.evictable(policy.n_sink, policy.n_recent) & ~recalled
    victims = ask(policy, replace(view, recalled=recalled), n)
    if others.sum(-1).min() >= n:
        assert not np.take_along_axis(recalled, victims, axis=-1).any()
    else:
        np.testing.assert_array_equal(victims, ask(policy, view, n), "as if nothing had been")


@pytest.mark.parametrize("name", [name for name in EVICTING if name != "random"])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_victims_do_not_depend_on_the_cells_entries_lie_in(name: str, data: st.DataObject) -> None:
    policy, view, n = data.draw(questions(name))
    order = np.random.default_rng(data.draw(st.integers(0, 99))).permutation(view.shape[-1])
    assert isinstance(view.observation, Drawn)
    moved = observed(
        policy,
        replace(
            view,
            scores=view.scores[..., order],
            pos=view.pos[..., order],
            observation=view.observation.moved(order),
            traces=None,
        ),
    )
    np.testing.assert_array_equal(
        np.take_along_axis(moved.pos, policy.victims(moved, n), axis=-1),
        np.take_along_axis(view.pos, policy.victims(view, n), axis=-1),
    )


@pytest.mark.parametrize(
    "policy", [H2O(512, n_recent=3), H2OPlus(512, n_recent=3), Streaming(512, n_recent=3)]
)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_equal_scores_go_oldest_first(policy: Any, data: st.DataObject) -> None:
    view = data.draw(views())
    view = CacheView(view.scores * 0, view.pos, view.n_past, view.n_used, view.decay, pins=view.pins)
    evictable = view.evictable(policy.n_sink, policy.n_recent)
    n = int(evictable.sum(axis=-1).min())
    assume(n > 0)
    victims = policy.victims(view, n)
    for il, ih in np.ndindex(*view.shape[:2]):
        oldest = sorted(view.pos[il, ih][evictable[il, ih]].tolist())[:n]
        assert view.pos[il, ih][victims[il, ih]].tolist() == oldest


@settings(max_examples=20, deadline=None)
@given(view=views())
def test_none_evicts_nothing_and_says_how_full_the_cache_is(view: CacheView) -> None:
    with pytest.raises(CacheFullError) as caught:
        ask(policies.make("none", budget=512), view, 1)
    assert (caught.value.n_used, caught.value.n_cells) == (view.n_used, view.shape[-1])
    assert str(view.n_used) in str(caught.value)


def test_streaming_keeps_order_beyond_the_exact_range_of_float32() -> None:
    pos = (2**26 + np.arange(32, dtype=np.int32))[::-1].reshape(1, 1, 32)
    view = CacheView(np.zeros((1, 1, 32), np.float32), pos, 2**26 + 32, 32)
    assert Streaming(32, n_recent=8).victims(view, 5).ravel().tolist() == [31, 30, 29, 28, 27]


def test_nan_is_refused_where_it_could_decide() -> None:
    scores = np.zeros((1, 1, 8), np.float32)
    scores[0, 0, 5] = np.nan
    view = CacheView(scores, np.arange(8, dtype=np.int32).reshape(1, 1, 8), 8, 8)
    with pytest.raises(PolicyError, match="1 scores are NaN"):
        H2O(8, n_recent=1).victims(view, 1)
    assert H2O(8, n_recent=4).victims(view, 1).ravel().tolist() == [0]


@pytest.mark.parametrize("granularity", ["layer", "token"])
def test_pooled_granularity_needs_equal_positions(granularity: Any) -> None:
    pos = np.tile(np.arange(8, dtype=np.int32), (2, 2, 1))
    pos[1, 1] = pos[1, 1, ::-1]
    view = CacheView(np.zeros(pos.shape, np.float32), pos, 8, 8)
    with pytest.raises(PolicyError, match="8 cells differ"):
        H2O(8, n_recent=0, granularity=granularity).victims(view, 1)


def test_layer_granularity_lets_layers_differ() -> None:
    pos = np.tile(np.arange(8, dtype=np.int32), (2, 2, 1))
    pos[1] = pos[1, :, ::-1]
    view = CacheView(np.zeros(pos.shape, np.float32), pos, 8, 8)
    assert H2O(8, n_recent=0, granularity="layer").victims(view, 1).ravel().tolist() == [0, 0, 7, 7]


def test_unknown_granularity_is_refused_with_the_legal_ones() -> None:
    with pytest.raises(OptionError, match="head, layer, token"):
        H2O(8, granularity="row")  # type: ignore[arg-type]


def test_too_few_evictable_entries_are_refused_with_numbers() -> None:
    view = CacheView(np.zeros((1, 1, 8), np.float32), np.arange(8, dtype=np.int32).reshape(1, 1, 8), 8, 8)
    with pytest.raises(BudgetError, match="4 entries must go from every KV head, but only 3 of 8 may"):
        select_lowest(view, view.scores, view.evictable(2, 3), 4)
