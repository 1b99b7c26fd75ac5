"""Answers side by side: of policies at several budgets, with an attic and without, and of the full cache.

python scripts/answers.py [MODEL] [--task grid] [--length 1024] [--kept 0.1] [--mode one-shot] [--out FILE]

Samples, reading and scores are those of `h2o-gguf eval`; results are kept and found again likewise.
"""

from __future__ import annotations

import argparse
import re
from contextlib import closing
from pathlib import Path

from report import arguments, environment, model_file, progress, save, table

from h2o_gguf.errors import H2OError
from h2o_gguf.evaluation.cells import plan
from h2o_gguf.evaluation.evaluator import Evaluator
from h2o_gguf.evaluation.opening import ModelFile
from h2o_gguf.evaluation.runner import n_tokens_left, run
from h2o_gguf.evaluation.statistics import Interval
from h2o_gguf.evaluation.store import Store, default_folder
from h2o_gguf.evaluation.summary import ALL, Row, summarize
from h2o_gguf.evaluation.tasks import FIDELITY, choose
from h2o_gguf.evaluation.variants import FULL, Variant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model if left out")
    parser.add_argument("--task", nargs="+", default=["grid"])
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--kept", type=float, nargs="+", default=[0.1], help="shares of it, or entries")
    parser.add_argument("-n", type=int, default=10, help="samples of a task, 1 or more")
    parser.add_argument("--policy", nargs="*", default=["h2o+"], help="without an attic")
    parser.add_argument("--attic", nargs="*", default=["h2o+"], help="policies with one")
    parser.add_argument("--mode", choices=["bounded", "one-shot"], default="bounded")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="0: the physical cores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.n < 1:
        parser.error(f"-n is {args.n}: it must be 1 or more")
    if not all(0 < kept < 1 or kept == kept // 1 >= 1 for kept in args.kept):
        parser.error(f"--kept is {args.kept}: it must be shares below 1, or whole entries")
    try:
        measure(args)
    except H2OError as error:
        parser.error(str(error))


def measure(args: argparse.Namespace) -> None:
    model = model_file(args.model)
    variants = [*map(Variant, args.policy), *(Variant(name, attic=True) for name in args.attic)]
    tasks = tuple(task for task in choose(args.task) if task != FIDELITY)
    cells = plan(
        variants, [kept if kept < 1 else int(kept) for kept in args.kept], tasks, [args.length],
        n_samples=args.n, seed=args.seed, mode=args.mode,
    )  # fmt: skip
    evaluator = Evaluator(ModelFile(model, args.threads))
    with (
        closing(Store(default_folder(), evaluator.facts())) as store,
        progress("answering", n_tokens_left(cells, store)) as move,
    ):
        results = list(run(cells, evaluator.answer, store, move))
    order = {cell: i for i, cell in enumerate(cells)}
    rows = summarize(sorted(results, key=lambda result: order[result.cell]))
    caches = list(dict.fromkeys((row.variant, row.kept) for row in rows))
    by_cache = {cache: {r.task: r for r in rows if (r.variant, r.kept) == cache} for cache in caches}
    full = by_cache[Variant(FULL), 1.0]
    lines = [line(by_task, full, tasks) for by_task in by_cache.values()]
    head = ["cache", *map(short, tasks), "all, % (95 %)", "of the full cache's, %", "n"]
    body = table(head, lines)
    data = {"environment": environment(model), "arguments": arguments(args)}
    save(args.out, body, {**data, "rows": lines, "results": [r.as_dict() for r in results]})


def line(by_task: dict[str, Row], full: dict[str, Row], tasks: tuple[str, ...]) -> list[str]:
    """Means in percent: by task, of those in which the full cache reaches 80, and over the full cache's."""
    row = next(iter(by_task.values()))
    name = "full" if row.variant.is_full else f"{row.variant.name}, {row.kept}"
    means = [f"{100 * by_task[task].score.mean:.0f}" for task in tasks]
    if ALL not in by_task:
        return [name, *means, "", "", ""]
    score, of_full = by_task[ALL].score, full[ALL].score.mean
    return [name, *means, percent(score, 1), percent(score, of_full), str(score.n)]


def percent(share: Interval, of: float) -> str:
    return f"{100 * share.mean / of:.0f} ({100 * share.low / of:.0f} .. {100 * share.high / of:.0f})"


def short(task: str) -> str:
    return re.sub(r"(grid|rivals|rivals-noise)-(?=\d)", "depth ", task)


if __name__ == "__main__":
    main()
