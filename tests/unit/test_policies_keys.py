"""Policies that look at keys, against plain loops over the papers' formulas."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from observations import lowest, plain_attention, view_of

from h2o_gguf.policies import RKV, KeyDiff, KNorm
from h2o_gguf.policies.rkv import redundancies
from h2o_gguf.view import CacheView


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    return float(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)))


@pytest.mark.parametrize("seed", range(4))
def test_keydiff_evicts_the_keys_closest_to_the_mean_direction(seed: int) -> None:
    view = view_of(seed=seed)
    victims = KeyDiff(24).victims(view, 9)
    for il, ih in np.ndindex(2, 2):
        keys: Any = view.seen.keys(il)[ih]
        held = [c for c in range(30) if view.pos[il, ih, c] >= 0]
        mean = sum(keys[c] / np.sqrt(keys[c] @ keys[c]) for c in held) / len(held)
        scores = [-cosine(keys[c], mean) for c in range(30)]
        assert victims[il, ih].tolist() == lowest(view, scores, il, ih, 9)


def test_knorm_evicts_the_longest_keys() -> None:
    view = view_of(seed=4)
    victims = KNorm(24).victims(view, 9)
    for il, ih in np.ndindex(2, 2):
        scores = [-(sum(float(x) ** 2 for x in key) ** 0.5) for key in view.seen.keys(il)[ih]]
        assert victims[il, ih].tolist() == lowest(view, scores, il, ih, 9)


def plain_redundancies(view: CacheView, il: int, ih: int, similar: float) -> list[float]:
    keys: Any = view.seen.keys(il)[ih]
    held = [c for c in range(view.shape[-1]) if view.pos[il, ih, c] >= 0]
    totals = dict.fromkeys(held, 0.0)
    for i in held:
        alike = [j for j in held if j != i and cosine(keys[i], keys[j]) > similar]
        newest = max(alike, key=lambda j: view.pos[il, ih, j], default=None)
        for j in alike:
            if j != newest:
                totals[j] += cosine(keys[i], keys[j])
    mass = {j: np.exp(total / len(held)) for j, total in totals.items()}
    return [mass[c] / sum(mass.values()) if c in mass else 0.0 for c in range(view.shape[-1])]


@pytest.mark.parametrize("similar", [0.0, 0.5, 0.9])
def test_redundancy_is_the_softmax_of_the_mean_cosine_of_similar_keys(similar: float) -> None:
    view = view_of(seed=6)
    for il in range(2):
        found = redundancies(view.seen.keys(il), view.pos[il], similar)
        for ih in range(2):
            np.testing.assert_allclose(found[ih], plain_redundancies(view, il, ih, similar), rtol=1e-9)


def test_of_a_group_of_equal_keys_the_newest_stays() -> None:
    view = view_of(n_layer=1, n_head_kv=1, n_cells=24, n_used=24, n_past=24, seed=9)
    keys = np.eye(24, 32)[None, None]  # all at right angles
    keys[0, 0, np.isin(view.pos[0, 0], (2, 5, 9))] = np.eye(32)[31]
    queries, query_pos = np.zeros((1, 1, 2, 1, 32)), np.array([23], np.int32)
    seen: Any = replace(view.seen, k=keys, q=queries, query_pos=query_pos)  # type: ignore[type-var]
    victims = RKV(24, n_recent=0, n_observed=1).victims(replace(view, observation=seen), 2)
    assert sorted(view.pos[0, 0][victims[0, 0]].tolist()) == [2, 5]


@pytest.mark.parametrize("seed", range(3))
def test_rkv_balances_pooled_attention_and_redundancy(seed: int) -> None:
    view = view_of(seed=seed, n_query=4, n_past=48)
    victims = RKV(24, n_recent=0, n_observed=4, kernel=5, balance=0.3).victims(view, 8)
    for il, ih in np.ndindex(2, 2):
        redundancy = plain_redundancies(view, il, ih, 0.5)
        attention = plain_attention(view, il)[ih].mean(1)
        prefix = sorted((int(p), c) for c, p in enumerate(view.pos[il, ih]) if 0 <= p < 44)
        scores = [float("inf")] * 30
        for at, (_, cell) in enumerate(prefix):
            near = [c for _, c in prefix[max(0, at - 2) : at + 3]]
            pooled = np.mean([max(head[c] for c in near) for head in attention])
            scores[cell] = 0.3 * float(pooled) - 0.7 * redundancy[cell]
        assert victims[il, ih].tolist() == lowest(view, scores, il, ih, 8)
