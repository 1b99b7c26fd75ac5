"""Policies that keep numbers per entry, against a simulation that takes one query at a time."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from observations import lowest, plain_attention, view_of

from h2o_gguf.policies import HCAttention, Lazy, Scissorhands, ask_traces
from h2o_gguf.view import CacheView


@dataclass
class Walk:
    """Looks at a cache several times; every look sees the queries since the one before."""

    view: CacheView  # at the end
    looks: list[CacheView]

    @classmethod
    def of(cls, sizes: list[int], seed: int, same_pos: bool = False) -> "Walk":
        n_query = sum(sizes)
        whole = view_of(n_query=n_query, seed=seed, n_past=n_query + 20, same_pos=same_pos, spread=2.0)
        looks, seen = [], 0
        full: Any = whole.seen
        for size in sizes:
            n_past = 20 + seen + size
            q = full.q[:, :, :, : seen + size]
            observation = replace(full, q=q, query_pos=full.query_pos[: seen + size])
            pos = np.where(whole.pos < n_past, whole.pos, -1)
            looks.append(replace(whole, pos=pos, n_past=n_past, observation=observation, n_unobserved=size))
            seen += size
        return cls(whole, looks)

    def run(self, policy: Any) -> CacheView:
        """The view at the end with the policy's traces."""
        traces = None
        for look in self.looks:
            traces = ask_traces(policy, replace(look, traces=traces))
        return replace(self.view, traces=traces, n_unobserved=0)

    def steps(self, il: int) -> list[tuple[int, NDArray[Any]]]:
        """(position, attention[n_head_kv, n_group, n_cells]) of each query, over the entries there then."""
        attention = plain_attention(self.view, il)
        return [(int(s), attention[:, :, t]) for t, s in enumerate(self.view.seen.query_pos)]


SIZES = [[1] * 9, [4, 1, 4], [9]]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("window", [1, 5, 400])
def test_scissorhands_counts_the_queries_that_give_more_than_the_average(
    sizes: list[int], window: int
) -> None:
    walk = Walk.of(sizes, seed=1)
    view = walk.run(Scissorhands(24, window=window))
    assert view.traces is not None
    for il, ih in np.ndindex(2, 2):
        counts = np.zeros(30)
        for s, attention in walk.steps(il):
            counts *= 1 - 1 / window
            t = sum(0 <= p <= s for p in view.pos[il, ih])
            for p in attention[ih]:
                counts += p > 1 / t
        np.testing.assert_allclose(view.traces[0, il, ih], counts, rtol=1e-6, atol=1e-7)
        victims = Scissorhands(24, n_recent=0, window=window).victims(view, 9)
        assert victims[il, ih].tolist() == lowest(view, view.traces[0, il, ih], il, ih, 9)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("active", [1e-4, 0.02, 0.2])
def test_lazy_knows_the_last_use_and_the_longest_gap(sizes: list[int], active: float) -> None:
    walk = Walk.of(sizes, seed=2)
    policy = Lazy(24, n_recent=0, active=active)
    view = walk.run(policy)
    victims = policy.victims(view, 9)
    now = view.n_past - 1
    for il, ih in np.ndindex(2, 2):
        scores = np.zeros(30)
        for cell, pos in enumerate(view.pos[il, ih]):
            last, longest = int(pos), 0
            for s, attention in walk.steps(il):
                if pos >= 0 and attention[ih, :, cell].max() > active:
                    longest, last = max(longest, s - last), s
            assert view.traces is not None
            if pos >= 0:
                assert view.traces[:, il, ih, cell].tolist() == [last - pos, longest]
            late = (now - last) / longest if longest else (np.inf if now > last else 0.0)
            scores[cell] = 2 / (1 + np.exp(late)) + 2 / (1 + np.exp(longest + 1.0))
        assert victims[il, ih].tolist() == lowest(view, scores, il, ih, 9)


def test_lazy_counts_no_gap_where_nobody_looked() -> None:
    """Of two batches of 8 the last 3 queries are recorded; time stands still in between."""
    walk = Walk.of([8, 8], seed=6)
    policy = Lazy(24, active=0.02)
    looks = []
    for look in walk.looks:
        seen: Any = look.seen
        newest = replace(seen, query_pos=seen.query_pos[-3:], q=seen.q[:, :, :, -3:])
        looks.append(replace(look, observation=newest))
    view = replace(walk, looks=looks).run(policy)
    assert view.traces is not None
    recorded = [*range(25, 28), *range(33, 36)]
    for il, ih in np.ndindex(2, 2):
        for cell, pos in enumerate(view.pos[il, ih]):
            if pos < 0:
                continue
            idle, longest = max(0, 19 - pos), 0  # ticks since the last use; the walk begins at 20
            for s, attention in walk.steps(il):
                if s < pos or s not in recorded:
                    continue
                idle += s > pos
                if attention[ih, :, cell].max() > 0.02:
                    longest, idle = max(longest, idle), 0
            assert view.traces[1, il, ih, cell] == longest
            assert view.n_past - 1 - pos - view.traces[0, il, ih, cell] == idle


def plain_weights(p: NDArray[Any], tau: float) -> NDArray[Any]:
    """p where it belongs to the smallest set that sums to tau, else 0."""
    chosen: list[int] = []
    for cell in sorted(range(len(p)), key=lambda c: -p[c]):
        if sum(p[c] for c in chosen) >= tau - 1e-12:
            break
        chosen.append(cell)
    return np.where(np.isin(np.arange(len(p)), chosen), p, 0)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("tau", [0.5, 0.9, 1.0])
def test_hcattention_sums_the_weights_of_the_smallest_sets(sizes: list[int], tau: float) -> None:
    walk = Walk.of(sizes, seed=3, same_pos=True)
    for granularity in ("layer", "head"):
        policy = HCAttention(24, n_recent=0, tau=tau, granularity=granularity)  # type: ignore[arg-type]
        view = walk.run(policy)
        victims = policy.victims(view, 9)
        for il in range(2):
            weights = np.zeros((2, 30))
            for _, attention in walk.steps(il):
                for ih in range(2):
                    p = attention[ih].mean(0) if granularity == "head" else attention.mean((0, 1))
                    weights[ih] += plain_weights(p, tau)
            assert view.traces is not None
            np.testing.assert_allclose(view.traces[0, il], weights, rtol=1e-5, atol=1e-7)
            for ih in range(2):
                assert victims[il, ih].tolist() == lowest(view, weights[ih], il, ih, 9)


@pytest.mark.parametrize("policy", [Scissorhands(24), Lazy(24), HCAttention(24)])
def test_a_look_without_new_queries_changes_nothing(policy: Any) -> None:
    view = Walk.of([3, 3], seed=4, same_pos=True).run(policy)
    np.testing.assert_array_equal(policy.observe(view), view.traces)
