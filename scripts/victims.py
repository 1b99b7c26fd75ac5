"""How long policies that record no queries take to name their victims, on one core and with no model.

    python scripts/victims.py [POLICY ...] [--layers 32 --heads 8 --cells 4096 -n 64] [--out FILE]

Timed is what stands between two batches: the copies a policy is shown, what it makes of the n new tokens, its
choice, and the check of it; not the reading of keys and values from the cache. Then the victims leave as they
do in the native cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray
from report import arguments, environment, save, table

from h2o_gguf import policies
from h2o_gguf.bindings.rows import NativeRows
from h2o_gguf.eviction import Evictor

HEAD_DIM = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("policies", nargs="*", default=["h2o+", "h2o", "streaming", "random"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--cells", type=int, default=4096)
    parser.add_argument("-n", type=int, default=64, help="victims per KV head")
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    lines = []
    for name in args.policies:
        cache = FullCache((args.layers, args.heads, args.cells))
        evictor = Evictor(policies.make(name, args.cells - args.n))
        for _ in range(args.cells // args.n):  # until every cell has been released once
            cache.replace(evictor(cache, args.n))
        times = sorted(duration_ms(evictor, cache, args.n) for _ in range(args.repeat))
        median, last = statistics.median(times), times[int(0.9 * len(times))]
        lines.append([name, *(f"{ms:.2f}" for ms in (times[0], median, last))])
    shape = f"{args.layers} layers x {args.heads} KV heads x {args.cells:,} cells, n = {args.n}"
    body = table(["policy", f"ms, {shape}: least of {args.repeat}", "median", "90 %"], lines)
    save(args.out, body, {"environment": environment(), "arguments": arguments(args), "rows": lines})


class FullCache:
    """A native cache without a model: numbers at random, and victims replaced by new tokens."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        n_layer, n_head_kv, n_cells = shape
        self.rng = np.random.default_rng(0)
        self.scores = self.rng.random(shape, np.float32)
        self.pos = np.broadcast_to(np.arange(n_cells, dtype=np.int32), shape).copy()
        self.recalled = np.zeros(shape, np.bool_)
        self.n_past = self.n_used = n_cells
        self.layer_ids = tuple(range(n_layer))
        self.contents = self.rng.normal(size=(n_head_kv * n_cells, HEAD_DIM)).astype(np.float32)
        self.observation = SimpleNamespace(keys=self._rows, values=self._rows)
        self.rows = NativeRows()

    def replace(self, victims: NDArray[np.int32]) -> None:
        """Let victims go: survivors move out of the oldest cells of the books, which take n new tokens."""
        n = victims.shape[-1]
        released = np.arange(self.n_past, self.n_past + n) % self.n_used
        for il, ih in np.ndindex(victims.shape[:2]):
            to, moved = np.setdiff1d(victims[il, ih], released), np.setdiff1d(released, victims[il, ih])
            for numbers in (self.pos[il, ih], self.scores[il, ih]):
                numbers[to] = numbers[moved]
        self.pos[..., released] = np.arange(self.n_past, self.n_past + n)
        self.scores[..., released] = self.rng.random((*victims.shape[:2], n), np.float32)
        self.n_past += n

    def _rows(self, _row: int, cells: NDArray[np.intp]) -> NDArray[np.float32]:
        """Some rows, at once, others each time; those of new tokens lie in the same cells of all heads."""
        n_head_kv = self.pos.shape[1]
        n = n_head_kv * len(cells)
        first = self.n_past % (len(self.contents) - n + 1)
        return self.contents[first : first + n].reshape(n_head_kv, len(cells), HEAD_DIM)


def duration_ms(evictor: Evictor, cache: FullCache, n: int) -> float:
    """Processor time of one eviction's victims, with n new tokens."""
    start = time.process_time()
    victims = evictor(cache, n)
    seconds = time.process_time() - start
    cache.replace(victims)
    return seconds * 1e3


if __name__ == "__main__":
    main()
