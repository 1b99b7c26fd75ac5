"""h2o+ against plain loops: what stands out, and how it shares the budget with heavy hitters."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from observations import lowest, view_of

from h2o_gguf.errors import OptionError
from h2o_gguf.policies import H2OPlus
from h2o_gguf.view import CacheView


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)))


def plain_standing(view: CacheView, il: int, ih: int, n_new: int, n_sample: int) -> dict[int, float]:
    """Of the newest n_new entries: |v| (1 - cos to the mean direction), averaged over 5 neighbours."""
    keys, values = view.seen.keys(il)[ih], view.seen.values(il)[ih]
    held = sorted(
        (c for c in range(view.shape[-1]) if view.pos[il, ih, c] >= 0), key=lambda c: view.pos[il, ih, c]
    )
    sample, new = held[-n_sample:], held[-n_new:]
    mean: Any = sum(keys[c] / np.sqrt(keys[c] @ keys[c]) for c in sample)
    raw = [float(np.sqrt(values[c] @ values[c])) * (1 - cosine(keys[c], mean)) for c in new]
    return {c: float(np.mean(raw[max(0, i - 2) : i + 3])) for i, c in enumerate(new)}


@pytest.mark.parametrize(("n_new", "same_pos"), [(24, False), (24, True), (1, True)])
def test_what_stands_out_is_measured_when_it_comes(n_new: int, same_pos: bool) -> None:
    view = view_of(seed=3, same_pos=same_pos)
    n_unobserved = view.n_past - int(view.pos.max()) if n_new == 1 else view.n_past
    before = np.where(view.pos >= 0, np.float32(7), np.float32(0))[None]
    found = H2OPlus(16).observe(replace(view, traces=before, n_unobserved=n_unobserved))
    for il, ih in np.ndindex(2, 2):
        expected = plain_standing(view, il, ih, n_new, 24)
        for c in range(30):
            old = 7.0 if view.pos[il, ih, c] >= 0 else 0.0
            assert found[0, il, ih, c] == pytest.approx(expected.get(c, old), rel=1e-5)


def with_numbers(seed: int) -> CacheView:
    view = view_of(seed=seed)
    rng = np.random.default_rng(seed)
    held = view.pos >= 0
    scores = np.where(held, rng.random(view.shape), 0).astype(np.float32)
    return replace(
        view, scores=scores, traces=np.where(held, rng.random(view.shape), 0).astype(np.float32)[None]
    )


@pytest.mark.parametrize(("standout", "n_heavy"), [(1.0, 0), (0.5, 6), (0.0, 12)])
def test_the_budget_is_shared_by_heavy_hitters_and_what_stands_out(standout: float, n_heavy: int) -> None:
    view = with_numbers(5)
    n = 12  # of 24, none protected: 12 stay
    victims = H2OPlus(12, n_sink=0, n_recent=0, decay=1, standout=standout).victims(view, n)
    assert view.traces is not None
    for il, ih in np.ndindex(2, 2):
        held = [c for c in range(30) if view.pos[il, ih, c] >= 0]
        rate = {c: view.scores[il, ih, c] / (view.n_past - view.pos[il, ih, c]) for c in held}
        heavy = sorted(held, key=lambda c: rate[c])[len(held) - n_heavy :]
        standing = [np.inf if c in heavy else view.traces[0, il, ih, c] for c in range(30)]
        assert sorted(victims[il, ih].tolist()) == sorted(lowest(view, standing, il, ih, n))


def plain_victims(policy: H2OPlus, view: CacheView, n: int) -> NDArray[np.int32]:
    """The same by whole sorts: who is heavy, then who of the others stands out least."""
    assert view.traces is not None
    evictable = view.evictable(policy.n_sink, policy.n_recent)
    axes = {"head": (), "layer": (1,), "token": (0, 1)}[policy.granularity]

    def pooled(scores: NDArray[Any]) -> NDArray[Any]:
        pool = scores.sum(axes, keepdims=True, dtype=np.float64) if axes else scores
        return np.broadcast_to(pool.astype(np.float32), view.shape)

    rates, standing = pooled(view.scores / view.queries_seen()), pooled(view.traces[0])
    n_heavy = max(0, round((1 - policy.standout) * (int(evictable.sum(-1).min()) - n)))
    victims = np.zeros((*view.shape[:2], n), np.int32)
    for il, ih in np.ndindex(view.shape[:2]):
        free = np.flatnonzero(evictable[il, ih])
        by_rate = sorted(free, key=lambda c: (rates[il, ih, c], view.pos[il, ih, c]))
        others = by_rate[: len(free) - n_heavy]
        victims[il, ih] = sorted(others, key=lambda c: (standing[il, ih, c], view.pos[il, ih, c]))[:n]
    return victims


@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_victims_equal_those_of_whole_sorts(granularity: Any, data: st.DataObject) -> None:
    n_cells = data.draw(st.sampled_from([5, 40, 1500]))
    n_used = data.draw(st.integers(1, n_cells))
    n_past = n_used + data.draw(st.integers(0, 50))
    view = view_of(2, 3, n_cells, n_used, n_past, data.draw(st.integers(0, 99)), granularity != "head")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    n_levels = data.draw(st.sampled_from([1, 3, 100_000]))  # ties, some, hardly any
    held = view.pos >= 0
    draws = np.where(held, rng.integers(0, n_levels, (2, *view.shape)) / 4, 0).astype(np.float32)
    start = data.draw(st.integers(0, n_past))
    view = replace(view, scores=draws[0], traces=draws[1:], pins=((start, start + n_used // 3),))
    policy = H2OPlus(
        n_cells,
        n_sink=data.draw(st.integers(0, 4)),
        n_recent=data.draw(st.integers(0, n_cells - 5)),
        granularity=granularity,
        decay=data.draw(st.sampled_from([0.0, 0.9, 1.0])),
        standout=data.draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])),
    )
    view = replace(view, decay=policy.decay)
    room = int(view.evictable(policy.n_sink, policy.n_recent).sum(-1).min())
    n = data.draw(st.integers(0, room))
    np.testing.assert_array_equal(policy.victims(view, n), plain_victims(policy, view, n))


def test_without_traces_heavy_hitters_alone_are_kept() -> None:
    view = replace(with_numbers(6), traces=None)
    alone = H2OPlus(12, n_sink=0, n_recent=0, standout=0).victims(view, 5)
    assert (H2OPlus(12, n_sink=0, n_recent=0).victims(view, 5) == alone).all()
    assert H2OPlus(12, standout=0).n_trace == 0


@pytest.mark.parametrize("standout", [-0.1, 1.1, True, "half", float("nan")])
def test_a_standout_that_is_no_share_is_refused(standout: Any) -> None:
    with pytest.raises(OptionError, match="standout"):
        H2OPlus(12, standout=standout)
