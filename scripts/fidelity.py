"""Table of fidelity to the full cache: every policy at 10 % and 20 %, on prose and on code.

python scripts/fidelity.py [MODEL] [--out docs/figures/fidelity]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from report import arguments, environment, model_file, progress, save, table

from h2o_gguf import H2OLlama, policies
from h2o_gguf.evaluation import compare, read_full
from h2o_gguf.evaluation.texts import code, prose

RUNS = [
    ("h2o+", {"granularity": "head"}),
    ("h2o", {"granularity": "head"}),
    ("h2o", {"granularity": "layer"}),
    ("h2o", {"granularity": "token"}),
    ("streaming", {}),
    ("random", {}),
    ("random", {"n_sink": 4, "n_recent": policies.AUTO}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model if left out")
    parser.add_argument("-n", type=int, default=3072, help="tokens read")
    parser.add_argument("--start", type=int, default=1024, help="first scored position")
    parser.add_argument("--batch", type=int, default=64, help="tokens read between evictions")
    parser.add_argument("--share", type=float, nargs="+", default=[0.1, 0.2], help="budgets as shares of -n")
    parser.add_argument("--text", nargs="+", default=["prose", "code"], choices=["prose", "code"])
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    parser.add_argument("--out", type=Path, help="writes PATH.md and PATH.json")
    args = parser.parse_args()
    model = model_file(args.model)
    started = time.monotonic()
    results: dict[str, list[dict[str, object]]] = {}
    for name in args.text:
        text = {"prose": prose, "code": code}[name]()
        # A budget that is never reached: the same kernel, nothing evicted.
        with H2OLlama(
            model, kv_budget=args.n + args.batch, n_batch=args.batch, n_threads=args.threads
        ) as llm:
            tokens = llm.tokenize(text.encode())[: args.n]
            with progress(f"{name}: full cache", args.n) as move:
                full = read_full(llm, tokens, args.start, move)
            none = compare(llm, tokens, full)
        rows = [{**none.as_dict(), "policy": "none", "share": 1.0}]
        for share in args.share:
            budget = round(share * args.n)
            for policy_name, knobs in RUNS:
                policy = policies.make(policy_name, budget, **knobs)
                with (
                    H2OLlama(model, policy=policy, n_batch=args.batch, n_threads=args.threads) as llm,
                    progress(f"{name}: {policy_name} {budget}", args.n) as move,
                ):
                    row = compare(llm, tokens, full, move)
                rows.append({**row.as_dict(), "share": share})
                print(json.dumps(rows[-1]), flush=True)
        results[name] = rows
    facts = environment(model, seconds=time.monotonic() - started)
    text = "\n\n".join(f"**{name}**\n\n{render(rows)}" for name, rows in results.items())
    save(args.out, text, {"environment": facts, "arguments": arguments(args), "results": results})


def render(rows: list[dict[str, object]]) -> str:
    return table(
        [
            "policy",
            "list per",
            "kept",
            "sinks + recent",
            "perplexity",
            "over full (95 %)",
            "KL to full",
            "top-1 agreement",
        ],
        [
            [
                row["policy"],
                row["granularity"] if row["policy"] != "none" else "",
                f"{row['share']:.0%} ({row['budget']})" if row["share"] != 1.0 else "all",
                f"{row['n_sink']} + {row['n_recent']}" if row["share"] != 1.0 else "",
                f"{row['perplexity']:.2f}",
                f"{row['ratio'] - 1:+.1%} ({row['low'] - 1:+.1%} .. {row['high'] - 1:+.1%})",
                f"{row['kl']:.4f}",
                f"{row['top1']:.1%}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
