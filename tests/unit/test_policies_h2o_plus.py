"""h2o+ against plain loops: what stands out, and how it shares the budget with heavy hitters."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
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


def test_without_traces_heavy_hitters_alone_are_kept() -> None:
    view = replace(with_numbers(6), traces=None)
    alone = H2OPlus(12, n_sink=0, n_recent=0, standout=0).victims(view, 5)
    assert (H2OPlus(12, n_sink=0, n_recent=0).victims(view, 5) == alone).all()
    assert H2OPlus(12, standout=0).n_trace == 0


@pytest.mark.parametrize("standout", [-0.1, 1.1, True, "half", float("nan")])
def test_a_standout_that_is_no_share_is_refused(standout: Any) -> None:
    with pytest.raises(OptionError, match="standout"):
        H2OPlus(12, standout=standout)
