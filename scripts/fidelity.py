"""Table of fidelity to the full cache: every policy at 10 % and 20 %, on prose and on code.

python scripts/fidelity.py [MODEL] [--out docs/figures/fidelity]

With --layer-budgets: h2o+ with the same budget in all layers, and split over them in these ways.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from report import arguments, environment, model_file, progress, save, table

from h2o_gguf import H2OLlama, policies
from h2o_gguf.calibration import calibrate
from h2o_gguf.evaluation import measure_fidelity, read_full
from h2o_gguf.evaluation.fidelity import bootstrap_ratio
from h2o_gguf.evaluation.texts import code, prose
from h2o_gguf.layer_budgets import read_layer_budgets
from h2o_gguf.policies import LayerBudgets, Policy

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
    parser.add_argument("--batch", type=int, default=128, help="tokens read between evictions")
    parser.add_argument("--share", type=float, nargs="+", default=[0.1, 0.2], help="budgets as shares of -n")
    parser.add_argument("--text", nargs="+", default=["prose", "code"], choices=["prose", "code"])
    parser.add_argument(
        "--layer-budgets", nargs="+", metavar="SPLIT",
        help="pyramid, pyramid:BETA, a file, or calibrated: on the second half of the text",
    )  # fmt: skip
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
            none = measure_fidelity(llm, tokens, full)
        runs = [(f"{policy}", partial(policies.make, policy, **knobs)) for policy, knobs in RUNS]
        if args.layer_budgets:
            runs = [("h2o+", partial(policies.make, "h2o+"))]
            runs += [(split, by_layer(split, model, text, args)) for split in args.layer_budgets]
        rows = [{**none.as_dict(), "policy": "none", "share": 1.0}]
        for share in args.share:
            budget = round(share * args.n)
            for policy_name, make in runs:
                policy = make(budget)
                with (
                    H2OLlama(model, policy=policy, n_batch=args.batch, n_threads=args.threads) as llm,
                    progress(f"{name}: {policy_name} {budget}", args.n) as move,
                ):
                    row = measure_fidelity(llm, tokens, full, move)
                    kv = llm.kv_report()
                    n_bytes, used = kv.bytes, kv.layer_budgets
                rows.append({**row.as_dict(), "share": share, "bytes": n_bytes})
                if policy_name == "h2o+":
                    alike = row.nll
                elif isinstance(policy, LayerBudgets):
                    low, high = bootstrap_ratio(row.nll, alike)
                    ratio = math.exp((row.nll - alike).mean())
                    rows[-1] |= {"ratio_alike": ratio, "low_alike": low, "high_alike": high}
                    rows[-1] |= {"policy": f"h2o+, {policy_name}", "budgets": used}
                print(json.dumps(rows[-1]), flush=True)
        results[name] = rows
    facts = environment(model, seconds=time.monotonic() - started)
    text = "\n\n".join(f"**{name}**\n\n{render(rows)}" for name, rows in results.items())
    save(args.out, text, {"environment": facts, "arguments": arguments(args), "results": results})


def by_layer(split: str, model: str, text: str, args: argparse.Namespace) -> Callable[[int], Policy]:
    """What makes h2o+ with a mean budget split like that."""
    if split == "calibrated":
        rest = text[len(text) // 2 :]
        with progress("calibrating", args.n) as move:
            budgets = calibrate(
                model, rest, n_tokens=args.n, n_threads=args.threads or 0, progress=move
            ).split
    else:
        budgets = read_layer_budgets(split, model)
    return lambda mean: LayerBudgets(budgets(mean), "h2o+")


def render(rows: list[dict[str, object]]) -> str:
    return table(
        [
            "policy",
            "list per",
            "kept",
            "KV bytes",
            "sinks + recent",
            "perplexity",
            "over full (95 %)",
            "over the same in all layers",
            "KL to full",
            "top-1 agreement",
        ],
        [
            [
                row["policy"],
                row["granularity"] if row["policy"] != "none" else "",
                f"{row['share']:.0%} ({row['budget']})" if row["share"] != 1.0 else "all",
                f"{row['bytes'] / 2**20:.1f} MiB" if "bytes" in row else "",
                f"{row['n_sink']} + {row['n_recent']}" if row["share"] != 1.0 else "",
                f"{row['perplexity']:.2f}",
                f"{row['ratio'] - 1:+.1%} ({row['low'] - 1:+.1%} .. {row['high'] - 1:+.1%})",
                f"{row['ratio_alike'] - 1:+.1%} ({row['low_alike'] - 1:+.1%} .. {row['high_alike'] - 1:+.1%})"
                if "ratio_alike" in row
                else "",
                f"{row['kl']:.4f}",
                f"{row['top1']:.1%}",
            ]
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
