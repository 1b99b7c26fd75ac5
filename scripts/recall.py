"""Answers to what was evicted: with an attic, without, and with the full cache.

python scripts/recall.py [MODEL] [--length 1024] [--kept 0.1] [--task grid] [--out docs/figures/recall]

Samples, reading in blocks and scores are those of `h2o-gguf eval`; results are kept and found again likewise.
"""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from report import arguments, environment, model_file, progress, save, table

from h2o_gguf.evaluation.cells import plan
from h2o_gguf.evaluation.evaluator import Evaluator
from h2o_gguf.evaluation.opening import ModelFile
from h2o_gguf.evaluation.runner import Result, n_tokens_left, run
from h2o_gguf.evaluation.statistics import bootstrap
from h2o_gguf.evaluation.store import Store, default_folder
from h2o_gguf.evaluation.tasks import choose
from h2o_gguf.evaluation.variants import FULL, Variant

FULL_CACHE = Variant(FULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model if left out")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--kept", type=float, default=0.1, help="a share of the length, or entries")
    parser.add_argument("-n", type=int, default=10, help="samples of a task")
    parser.add_argument("--task", nargs="+", default=["grid"])
    parser.add_argument("--policy", nargs="+", default=["h2o+", "random"], help="with and without an attic")
    parser.add_argument("--attic-only", nargs="*", default=["streaming"], help="with an attic only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0: the physical cores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = model_file(args.model)
    plain = [Variant(name) for name in args.policy]
    attics = [replace(v, attic=True) for v in (*plain, *map(Variant, args.attic_only))]
    kept = args.kept if args.kept < 1 else int(args.kept)
    tasks = choose(args.task)
    cells = plan([*plain, *attics], [kept], tasks, [args.length], n_samples=args.n, seed=args.seed)
    evaluator = Evaluator(ModelFile(model, args.threads))
    with (
        closing(Store(default_folder(), evaluator.facts())) as store,
        progress("answering", n_tokens_left(cells, store)) as move,
    ):
        results = list(run(cells, evaluator.answer, store, move))
    variants = sorted({r.cell.variant for r in results}, key=[FULL_CACHE, *plain, *attics].index)
    lines = [line(variant, results, tasks) for variant in variants]
    body = table(
        ["cache", *(short(task) for task in tasks), "all, % (95 %)", "of the full cache's", "n"], lines
    )
    data = {"environment": environment(model), "arguments": arguments(args)}
    save(args.out, body, {**data, "rows": lines, "results": [r.as_dict() for r in results]})


def line(variant: Variant, results: list[Result], tasks: tuple[str, ...]) -> list[str]:
    """Means over a variant's samples, in percent: by task, of all tasks, and over the full cache's."""

    def scores(wanted: Variant, task: str) -> list[float]:
        return [r.outcome.score for r in results if r.cell.variant == wanted and r.cell.task == task]

    groups = [scores(variant, task) for task in tasks]
    full = bootstrap([scores(FULL_CACHE, task) for task in tasks]).mean
    mean = bootstrap(groups)
    return [
        variant.name if not variant.is_full else "full",
        *(f"{100 * sum(group) / len(group):.0f}" for group in groups),
        f"{100 * mean.mean:.0f} ({100 * mean.low:.0f} .. {100 * mean.high:.0f})",
        f"{100 * mean.mean / full:.0f} %" if full else "",
        str(mean.n),
    ]


def short(task: str) -> str:
    return task.replace("grid-", "depth ")


if __name__ == "__main__":
    main()
