"""100,000 tokens through a budget of 512: memory must stay flat, and perplexity too.

python scripts/stream.py [MODEL] [-n 100000] [--budget 512] [--out docs/figures/stream]
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import numpy as np
import psutil
from report import arguments, environment, model_file, progress, save, table

from h2o_gguf import H2OLlama, policies
from h2o_gguf.evaluation import rows
from h2o_gguf.evaluation.texts import book

MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model if left out")
    parser.add_argument("-n", type=int, default=100_000, help="tokens")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256, help="tokens read between evictions")
    parser.add_argument("--bucket", type=int, default=8192)
    parser.add_argument("--policy", nargs="+", default=["h2o+", "streaming"])
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = model_file(args.model)
    process = psutil.Process()
    perplexity: dict[str, list[float]] = {}
    rss: dict[str, list[float]] = {}
    facts: dict[str, dict[str, object]] = {}
    started = time.monotonic()
    for name in args.policy:
        with H2OLlama(
            model, policy=policies.make(name, args.budget), n_batch=args.batch, n_threads=args.threads
        ) as llm:
            tokens = llm.tokenize(book().encode())[: args.n]
            nll = np.empty(len(tokens) - 1)
            memory = []
            with progress(name, len(tokens)) as move:
                for pos, logp in rows(llm, tokens, move):
                    nexts = tokens[pos + 1 : pos + 1 + len(logp)]
                    nll[pos : pos + len(nexts)] = -logp[np.arange(len(nexts)), nexts]
                    if pos // args.bucket == len(memory):
                        memory.append(process.memory_info().rss / MIB)
            kv = llm.engine.report()
        starts = range(0, len(nll), args.bucket)
        perplexity[name] = [math.exp(nll[i : i + args.bucket].mean()) for i in starts]
        rss[name] = memory
        facts[name] = {**kv.as_dict(), "perplexity": math.exp(nll.mean())}
    lines = [
        [
            f"{i * args.bucket:,}",
            *(f"{perplexity[p][i]:.2f}" for p in perplexity),
            *(f"{rss[p][i]:.1f}" for p in rss),
        ]
        for i in range(len(perplexity[args.policy[0]]))
    ]
    total = ["all", *(f"{facts[p]['perplexity']:.2f}" for p in facts), *("" for _ in facts)]
    head = ["from token", *(f"perplexity, {p}" for p in perplexity), *(f"RSS, {p} (MiB)" for p in rss)]
    body = table(head, [*lines, total])
    data = {"environment": environment(model, seconds=time.monotonic() - started), "facts": facts}
    save(
        args.out,
        body,
        {**data, "arguments": arguments(args), "perplexity": perplexity, "rss_mib": rss},
    )


if __name__ == "__main__":
    main()
