"""Which entries a recall exchanges, against the rule in plain numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attic_harness import (
    LAST,
    N_RECENT,
    N_SINK,
    N_UBATCH,
    Entry,
    Seen,
    cached,
    make_room,
    rows_of,
    stored,
    with_attic,
)
from harness import Run, random_tokens
from numpy.typing import NDArray
from tiny_models import build

QUESTION = random_tokens(8, seed=3)


def scores(
    run: Run, seen: Seen, entries: set[Entry], here: set[Entry], n_asked: int, every: int
) -> dict[Entry, float]:
    """The rule of recall.h, of a layer that asked with each every-th of the newest of the recorded queries.

    score = max over queries and query heads of (logit - log(sum over the cache of exp(logit))).
    """
    found: dict[Entry, float] = {}
    observation = run.cache.view().observation
    for layer in sorted({at[1] for at in entries}):
        queries = observation.queries(layer)[:, :, -n_asked:][:, :, ::-every]
        sinks = observation.sinks(layer)
        for head in range(run.cache.n_head_kv):
            of_head = [at for at in entries if at[1:3] == (layer, head)]
            keys = np.stack([seen.rows[at][1] for at in of_head])
            all_heads = np.broadcast_to(keys, (run.cache.n_head_kv, *keys.shape))
            logits = observation.logits(layer, queries, all_heads)[head].astype(np.float64)
            is_here = np.array([at in here for at in of_head])
            mass = np.exp(logits[..., is_here]).sum(-1)
            if sinks is not None:
                mass += np.exp(sinks[head])[:, None]
            best = (logits - np.log(mass)[..., None]).max((0, 1))
            found.update(zip(of_head, map(float, best), strict=True))
    return found


def with_neighbours(by_pos: NDArray[np.float64], n_before: int, n_after: int) -> NDArray[np.float64]:
    """An entry's score is the largest of the n_after positions before it and the n_before behind."""
    return np.array([by_pos[max(0, p - n_after) : p + n_before + 1].max() for p in range(len(by_pos))])


def exchanged(
    by_pos: NDArray[np.float64], out: list[int], back: list[int], n_most: int
) -> tuple[set[int], set[int]]:
    """The positions that leave the cache and that come into it: of equals the oldest first."""
    worst = sorted(out, key=lambda p: (by_pos[p], p))
    best = sorted(back, key=lambda p: (-by_pos[p], p))
    pairs = [(o, b) for o, b in zip(worst, best, strict=False) if by_pos[b] > by_pos[o]][:n_most]
    return {o for o, _ in pairs}, {b for _, b in pairs}


def positions(entries: set[Entry], layer: int, head: int) -> list[int]:
    return [at[3] for at in entries if at[1:3] == (layer, head)]


@pytest.mark.parametrize("n_most", [1, 5, LAST])
@pytest.mark.parametrize(
    ("n_asked", "ask_every", "around"), [(1, 1, (2, 8)), (3, 1, (2, 8)), (6, 2, (0, 1)), (LAST, 3, (0, 0))]
)
@pytest.mark.parametrize("alike", ["head", "layer", "token"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt-oss"])
def test_the_best_of_the_attic_come_for_the_worst_of_the_cache(
    arch: str, alike: Any, n_asked: int, ask_every: int, around: tuple[int, int], n_most: int, tmp_path: Path
) -> None:
    """In the first layer, which asks before anything was exchanged; in all where the upper ask together."""
    policy = "h2o" if alike == "head" else "streaming"
    with with_attic(build(arch, tmp_path / "m.gguf"), policy, n_observed=len(QUESTION)) as run:
        seen = Seen(run)
        seen.feed(random_tokens(150))
        make_room(run)
        here, there = cached(run), stored(run)
        n_past = run.cache.n_past()
        run.cache.attic.recall_next(
            [(0, N_SINK), (n_past - N_RECENT, LAST)],
            n_most=n_most,
            n_asked=n_asked,
            ask_every=ask_every,
            n_before=around[0],
            n_after=around[1],
            alike=alike,
        )
        run.decode(QUESTION)
        n_layer, n_head = run.cache.n_layer if alike == "token" else 1, run.cache.n_head_kv
        known = {at for at in here | there if at[1] < n_layer}
        score = scores(run, seen, known, here, n_asked, ask_every)
        if alike == "token":
            assert cached(run) - here == {at for at in cached(run) if at[3] >= n_past}, "it only asks"
            assert run.remove(n_past)
            run.cache.attic.recall_asked()

        by_head = np.full((n_layer, n_head, n_past), -np.inf)
        for (_, layer, head, pos), of_entry in score.items():
            by_head[layer, head, pos] = of_entry
        if alike == "head":
            by_pos = [with_neighbours(by_head[0, head], *around) for head in range(n_head)]
        else:
            by_layer = [with_neighbours(of_layer.max(0), *around) for of_layer in by_head]
            votes = np.exp(np.minimum(by_layer[n_layer // 2 :], 0)).sum(0)
            by_pos = [votes if alike == "token" else by_layer[0]] * n_head
        after = {at for at in cached(run) if at[3] < n_past}
        n_exchanged = 0
        for layer in range(n_layer):
            for head in range(n_head):
                before = set(positions(here, layer, head))
                free = [p for p in before if N_SINK <= p < n_past - N_RECENT]
                left, came = exchanged(by_pos[head], free, positions(there, layer, head), n_most)
                assert set(positions(after, layer, head)) == (before - left) | came, (layer, head)
                n_exchanged += len(came)
        assert n_exchanged > 0


@pytest.mark.parametrize("alike", ["layer", "token"])
def test_what_one_head_has_dropped_comes_back_in_none(alike: Any, tmp_path: Path) -> None:
    """Heads that are alike stay so where a full attic has dropped other entries in each."""
    path = build("llama", tmp_path / "m.gguf", n_ctx_train=1024)
    with with_attic(path, "streaming") as run:
        run.feed(random_tokens(100), N_UBATCH)
        chunk = run.cache.attic.info().bytes
    with with_attic(path, "streaming", attic={"max_bytes": chunk}) as run:
        seen = Seen(run)
        seen.feed(random_tokens(500))
        make_room(run)
        here, there = cached(run), stored(run)
        n_past, heads = run.cache.n_past(), list(np.ndindex(run.cache.n_layer, run.cache.n_head_kv))
        everywhere = set.intersection(*(set(positions(there, *head)) for head in heads))
        assert any(set(positions(there, *head)) != everywhere for head in heads)
        run.cache.attic.recall_next([(0, N_SINK), (n_past - N_RECENT, LAST)], alike=alike)
        run.decode(QUESTION)
        if alike == "token":
            assert run.remove(n_past)
            run.cache.attic.recall_asked()
        back = {at for at in cached(run) - here if at[3] < n_past}
        assert back and back <= there
        for layer, head in heads:
            assert set(positions(back, layer, head)) == set(positions(back, layer, 0))
        for at, (rope, key, value) in rows_of(run).items():
            if at[3] < n_past:
                assert rope == seen.rows[at][0]
                assert np.array_equal(key, seen.rows[at][1]) and np.array_equal(value, seen.rows[at][2]), at
