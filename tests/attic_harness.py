"""What an attic and its cache hold together, entry by entry."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from harness import Run, opened, policy_of, random_tokens
from numpy.typing import NDArray
from tiny_models import ARCHITECTURES

from h2o_gguf.policies import make

BUDGET, N_UBATCH, N_SINK, N_RECENT = 48, 32, 4, 16
LAST = 2**31 - 1
BEFORE, AFTER = 2, 8  # neighbours that come with an entry
ROOM = 1 << 24  # bytes, more than any of these tests fills
EVICTED = [arch for arch, expected in ARCHITECTURES.items() if expected.evicts]
ONLY_FLASH = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl")  # quantized values need it
Entry = tuple[int, int, int, int]  # group, layer of it, KV head, position


@contextlib.contextmanager
def with_attic(
    path: Path, name: str = "h2o+", budget: int = BUDGET, attic: dict[str, Any] | None = None, **options: Any
) -> Iterator[Run]:
    """A cache whose evicted entries stay."""
    policy = make(name, budget, n_sink=N_SINK, n_recent=min(N_RECENT, budget // 2))
    options = {"n_ubatch": N_UBATCH, "budget": budget, "block": 8, "decay": policy.decay, **options}
    with opened(path, **options) as run:
        policy_of(run, policy)
        open_attics(run, **(attic or {}))
        yield run


def open_attics(run: Run, max_bytes: int = ROOM, **options: Any) -> None:
    for group in run.cache.groups:
        group.attic.open(max_bytes, **options)


def recall_next(run: Run, keep: Sequence[tuple[int, int]] = (), **options: Any) -> None:
    """As the engine does for a question: sinks and the recent window stay."""
    options = {"n_before": BEFORE, "n_after": AFTER, **options}
    n_past = run.cache.groups[0].n_past()
    for group in run.cache.groups:
        group.attic.recall_next([(0, N_SINK), *keep, (n_past - N_RECENT, LAST)], **options)


def history(run: Run, n: int = 150) -> None:
    """n tokens, then room for eight that evict nothing."""
    run.feed(random_tokens(n), N_UBATCH)
    make_room(run)


def make_room(run: Run) -> None:
    """For eight tokens."""
    for group in run.cache.groups:
        group.make_room(min(group.used(), group.budget - 8))


def cached(run: Run) -> set[Entry]:
    return {
        (g, int(layer), int(head), int(group.pos[layer, head, cell]))
        for g, group in enumerate(run.cache.groups)
        for layer, head, cell in np.argwhere(group.pos >= 0)
    }


def stored(run: Run) -> set[Entry]:
    return {
        (g, layer, head, int(pos))
        for g, group in enumerate(run.cache.groups)
        for layer in range(group.n_layer)
        for head, held in enumerate(group.attic.positions(layer))
        for pos in held
    }


def recalled(run: Run) -> set[Entry]:
    found = set()
    for g, group in enumerate(run.cache.groups):
        view = group.view()
        for layer, head, cell in np.argwhere(view.recalled):
            found.add((g, int(layer), int(head), int(view.pos[layer, head, cell])))
    return found


def rows_of(run: Run) -> dict[Entry, tuple[int, NDArray[np.float32], NDArray[np.float32]]]:
    """Rotary position, key and value of every entry of the cache."""
    found = {}
    for g, group in enumerate(run.cache.groups):
        view = group.view()
        pos, rope = view.pos.copy(), view.rope_pos.copy()
        for layer in range(group.n_layer):
            keys, values = group.keys(layer), group.values(layer)
            for head, cell in np.argwhere(pos[layer] >= 0):
                at = int(layer), int(head), int(pos[layer, head, cell])
                found[(g, *at)] = int(rope[layer, head, cell]), keys[head, cell], values[head, cell]
    return found


class Seen:
    """Rows of every entry when it was new."""

    def __init__(self, run: Run) -> None:
        self.run, self.rows = run, rows_of(run)

    def feed(self, tokens: list[int]) -> None:
        for i in range(0, len(tokens), N_UBATCH):
            self.run.decode(tokens[i : i + N_UBATCH])
            self.rows = rows_of(self.run) | self.rows


def all_entries(run: Run) -> set[Entry]:
    """Every position of the sequence in every head of every layer."""
    return {
        (g, layer, head, pos)
        for g, group in enumerate(run.cache.groups)
        for layer in range(group.n_layer)
        for head in range(group.n_head_kv)
        for pos in range(group.n_past())
    }


def check_books(run: Run) -> None:
    """Cache and attic hold every position of the sequence, and none of them twice."""
    here, there = cached(run), stored(run)
    assert not here & there
    assert here | there == all_entries(run)
    for group in run.cache.groups:
        assert group.attic.info().n_entry + group.used() == group.n_past()


def total(run: Run, name: str) -> int:
    return sum(int(getattr(group.attic.info(), name)) for group in run.cache.groups)
