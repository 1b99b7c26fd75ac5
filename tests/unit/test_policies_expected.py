"""Expected attention against brute force: every future position, rotation matrices, and drawn queries."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from observations import half_rotation, lowest, view_of

from h2o_gguf.observation import Rotation
from h2o_gguf.policies import ExpectedAttention
from h2o_gguf.policies.expected_attention import expected_logits
from h2o_gguf.view import CacheView

HEAD_DIM = 8


def matrix(rotation: Rotation | None, by: int) -> NDArray[np.float64]:
    """The rotation by that many positions as a matrix, an element at a time."""
    out = np.eye(HEAD_DIM)
    if rotation is not None:
        for a, b, angle in zip(rotation.first, rotation.second, rotation.angle, strict=True):
            c, s = np.cos(by * angle), np.sin(by * angle)
            out[a, a], out[a, b], out[b, a], out[b, b] = c, -s, s, c
    return out


def statistics(
    view: CacheView, il: int, ih: int, g: int, n_sink: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and covariance of a head's queries, each turned to the newest position."""
    seen: Any = view.seen
    turned = np.array(
        [
            matrix(seen.rotates, view.n_past - 1 - int(s)) @ seen.q[il, ih, g, t]
            for t, s in enumerate(seen.query_pos)
            if s >= n_sink
        ]
    )
    mean = turned.mean(0)
    return mean, (turned - mean).T @ (turned - mean) / len(turned)


def plain_logits(view: CacheView, il: int, ih: int, g: int, n_sink: int, n_future: int) -> list[float]:
    seen: Any = view.seen
    mean, covariance = statistics(view, il, ih, g, n_sink)
    turns = [matrix(seen.rotates, j) for j in range(1, n_future + 1)]
    m = sum(turn @ mean for turn in turns) / n_future
    s = sum(turn @ covariance @ turn.T for turn in turns) / n_future
    return [float(key @ m) / HEAD_DIM**0.5 + float(key @ s @ key) / (2 * HEAD_DIM) for key in seen.k[il, ih]]


@pytest.mark.parametrize("rotates", [True, False])
@pytest.mark.parametrize("n_future", [1, 33])
def test_logits_are_the_average_over_the_next_positions(rotates: bool, n_future: int) -> None:
    view = view_of(seed=2, n_query=12, rotates=rotates)
    for il in range(2):
        found = expected_logits(view, il, 4, n_future)
        for ih, g in np.ndindex(2, 2):
            expected = np.where(
                view.pos[il, ih] >= 0, plain_logits(view, il, ih, g, 4, n_future), found[ih, g]
            )
            np.testing.assert_allclose(found[ih, g], expected, rtol=1e-9, atol=1e-12)


def test_at_one_position_it_is_the_log_normal_mean_of_drawn_queries() -> None:
    view = view_of(seed=7, n_query=12, spread=0.4)
    seen: Any = view.seen
    mean, covariance = statistics(view, 0, 0, 0, 0)
    rng = np.random.default_rng(0)
    n = 200_000
    queries = rng.multivariate_normal(mean, covariance, n) @ matrix(seen.rotates, 1).T
    found = expected_logits(view, 0, 0, 1)[0, 0]
    for cell in np.flatnonzero(view.pos[0, 0] >= 0):
        sample = np.exp(queries @ seen.k[0, 0, cell] / HEAD_DIM**0.5)
        error = sample.std() / np.sqrt(n)
        assert abs(np.exp(found[cell]) - sample.mean()) < 5 * error


def test_scores_are_mean_shares_plus_epsilon_times_the_length_of_the_value() -> None:
    view = view_of(seed=3, n_query=12, n_past=50)
    seen: Any = view.seen
    victims = ExpectedAttention(24, n_sink=2, n_recent=0, n_future=16, epsilon=0.02).victims(view, 8)
    for il, ih in np.ndindex(2, 2):
        others = [c for c in range(30) if view.pos[il, ih, c] >= 2]
        scores = np.full(30, np.inf)
        shares = np.zeros(30)
        for g in range(2):
            mass = np.exp(plain_logits(view, il, ih, g, 2, 16))
            shares[others] += mass[others] / mass[others].sum() / 2
        for c in others:
            scores[c] = (shares[c] + 0.02) * np.sqrt(seen.v[il, ih, c] @ seen.v[il, ih, c])
        assert victims[il, ih].tolist() == lowest(view, scores, il, ih, 8)


def test_queries_that_were_scaled_before_are_not_scaled_again() -> None:
    view = view_of(seed=4, n_query=12)
    seen: Any = view.seen
    scaled = replace(view, observation=replace(seen, q=seen.q * seen.scale, scale=1.0))
    np.testing.assert_allclose(expected_logits(scaled, 0, 0, 9), expected_logits(view, 0, 0, 9), rtol=1e-9)


def test_a_query_before_the_sinks_end_is_no_evidence() -> None:
    view = view_of(n_used=8, n_past=8, n_query=8, seed=1)
    seen: Any = view.seen
    q = seen.q.copy()
    q[..., :4, :] = 99.0
    other = replace(view, observation=replace(seen, q=q))
    np.testing.assert_array_equal(expected_logits(other, 0, 4, 5), expected_logits(view, 0, 4, 5))


def test_the_rotation_of_these_tests_leaves_two_elements_alone() -> None:
    rotation = half_rotation(HEAD_DIM)
    assert rotation.first.tolist() == [0, 1, 2] and rotation.second.tolist() == [4, 5, 6]
