"""How long policies that record no queries take to name their victims, on one core and with no model.

    python scripts/victims.py [POLICY ...] [--layers 32 --heads 8 --cells 4096 -n 64] [--out FILE]

Timed is what stands between two tokens: the copies a policy is shown, what it makes of the n new tokens, its
choice, and the check of it; not the reading of keys and values from the cache.
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
    cache = full_cache((args.layers, args.heads, args.cells))
    lines = []
    for name in args.policies:
        evictor = Evictor(policies.make(name, args.cells - args.n))
        evictor(cache, args.n)  # all is new to it
        times = sorted(duration_ms(evictor, cache, args.n) for _ in range(args.repeat))
        median, last = statistics.median(times), times[int(0.9 * len(times))]
        lines.append([name, *(f"{ms:.2f}" for ms in (times[0], median, last))])
    shape = f"{args.layers} layers x {args.heads} KV heads x {args.cells:,} cells, n = {args.n}"
    body = table(["policy", f"ms, {shape}: least of {args.repeat}", "median", "90 %"], lines)
    save(args.out, body, {"environment": environment(), "arguments": arguments(args), "rows": lines})


def full_cache(shape: tuple[int, int, int]) -> SimpleNamespace:
    """A cache that every head has kept other positions in, of a sequence twice as long; the newest in all."""
    rng = np.random.default_rng(0)
    contents = rng.normal(size=(shape[1], shape[2], HEAD_DIM)).astype(np.float32)

    def rows(_row: int, cells: NDArray[np.intp] | None = None) -> NDArray[np.float32]:
        return contents if cells is None else contents[:, cells]

    n_cells, n_past = shape[-1], 2 * shape[-1]
    n_recent = n_cells // 2
    kept = rng.random((*shape[:2], n_past - n_recent)).argsort(axis=-1)[..., : n_cells - n_recent]
    newest = np.broadcast_to(np.arange(n_past - n_recent, n_past), (*shape[:2], n_recent))
    return SimpleNamespace(
        scores=rng.random(shape, np.float32),
        pos=np.concatenate([np.sort(kept, axis=-1), newest], axis=-1).astype(np.int32),
        n_past=n_past,
        n_used=n_cells,
        layer_ids=tuple(range(shape[0])),
        observation=SimpleNamespace(keys=rows, values=rows, query_pos=np.zeros(0, np.int32)),
    )


def duration_ms(evictor: Evictor, cache: SimpleNamespace, n: int) -> float:
    """Processor time of one eviction's victims, with n new tokens."""
    evictor.drop_from(cache.n_past - n)
    start = time.process_time()
    evictor(cache, n)
    return (time.process_time() - start) * 1e3


if __name__ == "__main__":
    main()
