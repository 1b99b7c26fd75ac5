"""Rate of reading a long text in a budget: as fast late in it as early.

python scripts/prefill.py [MODEL] [-n 30000] [--budget 1024] [--out docs/figures/prefill]
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path

from report import arguments, environment, model_file, progress, save, table

from h2o_gguf import H2OLlama, policies
from h2o_gguf.benchmark.results import Spread
from h2o_gguf.evaluation.texts import book


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model if left out")
    parser.add_argument("-n", type=int, default=30_000, help="tokens")
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--policy", default="h2o+")
    parser.add_argument("--batch", type=int, help="tokens read between evictions; default: the engine's")
    parser.add_argument("--from", dest="first", type=int, default=4000, help="where the early tokens start")
    parser.add_argument("--width", type=int, default=2000, help="early tokens, and late ones")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    late = args.n - args.width
    if args.first + args.width > late:
        parser.error(f"early and late tokens overlap: -n must be {args.first + 2 * args.width} or more")
    model = model_file(args.model)
    policy = policies.make(args.policy, args.budget)
    rates: list[tuple[int, float]] = []
    with (
        H2OLlama(model, policy=policy, n_batch=args.batch, n_threads=args.threads) as llm,
        progress("reading", args.n) as move,
    ):
        tokens = llm.tokenize(book().encode())[: args.n]
        n_batch = llm.engine.context.n_batch
        for start in range(0, len(tokens), n_batch):
            batch = tokens[start : start + n_batch]
            started = time.perf_counter()
            llm.engine.prefill(batch)
            rates.append((start, len(batch) / (time.perf_counter() - started)))
            move(start + len(batch), args.n)
        kv = llm.kv_report()
    whole = rates[: args.n // n_batch]
    spreads = [
        Spread.of(rate for pos, rate in whole if start <= pos < start + args.width)
        for start in (args.first, late)
    ]
    lines = [
        [f"{start:,} to {start + args.width:,}", s.n, f"{s.median:.1f} ({s.q1:.1f} .. {s.q3:.1f})"]
        for start, s in zip((args.first, late), spreads, strict=True)
    ]
    lines.append(["late over early", "", f"{spreads[1].median / spreads[0].median:.3f}"])
    body = table(["tokens", f"batches of {n_batch}", "tok/s, median (quartiles)"], lines)
    data = {"environment": environment(model), "arguments": arguments(args), "kv": kv.as_dict()}
    save(args.out, body, {**data, "spreads": [asdict(s) for s in spreads], "rates": rates})


if __name__ == "__main__":
    main()
