"""What policies keep, in a simulated cache: the paper's algorithm, borders, newcomers, controls."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_gguf.policies import H2O, H2OPlus, Random, Streaming, ask
from h2o_gguf.view import CacheView

Logits = NDArray[np.float64]  # [n_head_kv, n_tokens, n_tokens], query x key


def simulate(policy: Any, logits: Logits, block: int = 1) -> tuple[list[list[int]], float]:
    """Feed tokens one at a time; return the positions each head keeps and the mean attention mass it kept."""
    n_head_kv, n_tokens, _ = logits.shape
    n_cells = policy.budget + block
    pos = np.full((1, n_head_kv, n_cells), -1, np.int32)
    scores = np.zeros(pos.shape, np.float32)
    n_used, kept_mass = 0, []
    for t in range(n_tokens):
        scores *= np.float32(policy.decay)
        for ih in range(n_head_kv):
            free = int(np.flatnonzero(pos[0, ih] < 0)[0])
            pos[0, ih, free], scores[0, ih, free] = t, 0.0
            cells = np.flatnonzero(pos[0, ih] >= 0)
            weights = np.exp(logits[ih, t])
            kept = weights[pos[0, ih, cells]]
            scores[0, ih, cells] += (kept / kept.sum()).astype(np.float32)
            kept_mass.append(kept.sum() / weights[: t + 1].sum())
        n_used += 1
        if n_used == n_cells:
            view = CacheView(scores, pos, t + 1, n_used, policy.decay)
            for ih, cells in enumerate(ask(policy, view, block)[0]):
                pos[0, ih, cells], scores[0, ih, cells] = -1, 0.0
            n_used -= block
    return [sorted(p for p in head.tolist() if p >= 0) for head in pos[0]], float(np.mean(kept_mass))


def paper_h2o(logits: Logits, heavy: int, recent: int) -> list[list[int]]:
    """arXiv 2306.14048, algorithm 1, with the recent window of its experiments, as one reads it."""
    kept_by_head = []
    for head in logits:
        kept: list[int] = []
        score: dict[int, float] = {}
        for t in range(len(head)):
            kept.append(t)
            score[t] = 0.0
            total = sum(np.exp(head[t, i]) for i in kept)
            for i in kept:
                score[i] += np.exp(head[t, i]) / total
            if len(kept) > heavy + recent:
                older = [i for i in kept if i <= t - recent]
                kept.remove(min(older, key=lambda i: score[i]))
        kept_by_head.append(kept)
    return kept_by_head


def with_heavy_hitters(n_tokens: int, seed: int, heavy: tuple[int, ...] = (), bonus: float = 4.0) -> Logits:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, 1.0, (2, n_tokens, n_tokens))
    logits[:, :, list(heavy)] += bonus
    return logits


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("heavy", "recent"), [(8, 8), (12, 4), (1, 1), (6, 0)])
def test_h2o_evicting_one_at_a_time_is_the_papers_algorithm(seed: int, heavy: int, recent: int) -> None:
    logits = with_heavy_hitters(80, seed)
    kept, _ = simulate(H2O(heavy + recent, n_recent=recent), logits)
    assert kept == paper_h2o(logits, heavy, recent)


def test_h2o_has_the_papers_setting_by_default() -> None:
    policy = H2O(410)
    assert (policy.n_recent, policy.n_sink, policy.decay, policy.needs_scores) == (205, 0, 1.0, True)


@pytest.mark.parametrize("policy", [H2O(32), H2OPlus(32)])
def test_generated_tokens_can_become_heavy_hitters(policy: Any) -> None:
    kept, _ = simulate(policy, with_heavy_hitters(160, 0, heavy=(3, 70)))
    assert all(70 in head for head in kept)


def test_without_a_recent_window_plain_h2o_freezes_on_the_prompt() -> None:
    kept, _ = simulate(H2O(16, n_recent=0), np.zeros((1, 120, 120)))
    assert kept == [[*range(16)]]


@pytest.mark.parametrize("n_tokens", [31, 32, 33, 34, 60])
@pytest.mark.parametrize("policy", [H2O, H2OPlus, Streaming, Random])
def test_borders_are_exact_when_sinks_and_window_fill_the_budget(policy: Any, n_tokens: int) -> None:
    kept, _ = simulate(policy(32, n_sink=4, n_recent=28), with_heavy_hitters(n_tokens, 1))
    expected = [*range(min(4, n_tokens)), *range(max(4, n_tokens - 28), n_tokens)]
    assert kept == [expected, expected]


@pytest.mark.parametrize("block", [1, 7, 64])
def test_streaming_keeps_the_first_and_the_last_whatever_its_window(block: int) -> None:
    n_tokens = 64 + 5 * block
    kept, _ = simulate(Streaming(64, n_sink=4, n_recent=0), np.zeros((1, n_tokens, n_tokens)), block)
    assert kept == [[*range(4), *range(n_tokens - 60, n_tokens)]]


def test_the_mean_gives_a_newcomer_the_chance_the_sum_denies_it() -> None:
    # Seen by 100 queries at 0.010 each, against 10 queries at 0.012 each.
    scores = np.array([[[1.0, 0.12, 9.0]]], np.float32)
    view = CacheView(scores, np.array([[[0, 90, 99]]], np.int32), 100, 3)
    assert H2O(8, n_recent=1).victims(view, 1).ravel().tolist() == [1]
    assert H2OPlus(8, n_sink=0, n_recent=1, decay=1.0).victims(view, 1).ravel().tolist() == [0]


def test_decay_lets_go_of_a_heavy_hitter_that_is_no_longer_used() -> None:
    logits = with_heavy_hitters(400, 2)
    logits[:, :100, 10] += 6.0
    logits[:, 100:, 10] -= 6.0
    plain, _ = simulate(H2OPlus(32, decay=1.0), logits)
    fading, _ = simulate(H2OPlus(32, decay=0.98), logits)
    assert all(10 in head for head in plain)
    assert not any(10 in head for head in fading)


@pytest.mark.parametrize("policy", [H2O, H2OPlus])
@pytest.mark.parametrize("seed", range(3))
def test_attention_based_policies_keep_more_mass_than_random(policy: Any, seed: int) -> None:
    logits = with_heavy_hitters(200, seed, heavy=(0, 9, 31, 55, 80, 102, 131))
    _, kept = simulate(policy(32), logits, block=8)
    _, control = simulate(Random(32, n_sink=0, seed=seed), logits, block=8)
    assert kept > control + 0.1


def test_random_is_uniform_over_what_may_go() -> None:
    pos = np.arange(24, dtype=np.int32).reshape(1, 1, 24)
    counts = np.zeros(24)
    for seed in range(1600):
        view = CacheView(np.zeros(pos.shape, np.float32), pos, 24, 24)
        counts[Random(24, n_sink=4, n_recent=4, seed=seed).victims(view, 4)] += 1
    assert counts[:4].sum() == counts[20:].sum() == 0
    # Binomial(1600, 4/16): mean 400, sigma 17.3.
    assert np.abs(counts[4:20] - 400).max() < 5 * 17.3


def test_random_heads_differ_and_seeds_differ() -> None:
    pos = np.tile(np.arange(64, dtype=np.int32), (2, 2, 1))
    view = CacheView(np.zeros(pos.shape, np.float32), pos, 64, 64)
    victims = Random(64).victims(view, 8)
    assert len({tuple(sorted(head)) for layer in victims.tolist() for head in layer}) == 4
    assert not np.array_equal(victims, Random(64, seed=1).victims(view, 8))
