"""An evaluation as files: JSON, Markdown, and a page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o_gguf.cli.bench_files import COLOURS, MARKERS
from h2o_gguf.cli.eval_table import notes, sheets, show_kept, write_markdown
from h2o_gguf.cli.page import make_page, write_texts
from h2o_gguf.evaluation.evaluation import Report
from h2o_gguf.evaluation.side_by_side import Reading
from h2o_gguf.evaluation.statistics import Interval
from h2o_gguf.evaluation.summary import ALL, Row
from h2o_gguf.evaluation.variants import FULL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["write_files"]

MIB = 2**20
Point = tuple[str, Any, Interval]  # name of a cache, row, value


def write_files(report: Report, prefix: Path) -> list[Path]:
    """Write PREFIX.json, .md and .html; return their paths."""
    title = f"Policies and budgets: {report.environment['model']}"
    advice = report.recommendation
    page = make_page(
        title, _draw(report), list(sheets(report)), notes(report), advice.headline, advice.reasons
    )
    data = json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n"
    return write_texts(prefix, {"html": page, "json": data, "md": write_markdown(report)})


def _draw(report: Report) -> Figure:
    """Score and perplexity over the budget and over memory, and speed over the length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    longest = max((row.length for row in report.rows), default=0)
    rows = [row for row in report.rows if row.length == longest and row.task == ALL]
    names = list(dict.fromkeys([r.variant.name for r in rows] + [f.variant.name for f in report.fidelity]))
    scores = [(row.variant.name, row, _scaled(row.score, 100)) for row in rows]
    texts = [(each.variant.name, each, each.ratio) for each in report.fidelity]
    for column, (label, x) in enumerate((("kept, %", _share), ("KV kept, MiB", _mib))):
        for axis, points in ((axes[0][column], scores), (axes[1][column], texts)):
            _lines(axis, names, points, x)
            axis.set_xlabel(label)
    axes[0][0].set_title(f"score at {longest:,} tokens, %" if rows else "score: no task that counts")
    axes[0][1].set_title("score over memory, %")
    axes[1][0].set_title("perplexity over the full cache's")
    axes[1][1].set_title("the same over memory")
    _speed(axes[0][2], report.rows, lambda row: row.write_rate)
    axes[0][2].set_title("writing, tokens/s")
    _speed(axes[1][2], report.rows, lambda row: row.read_rate)
    axes[1][2].set_title("reading, tokens/s")
    for axis in (*axes[0], *axes[1]):
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    named: dict[str, Any] = {}
    for axis in axes[:, 0]:
        handles, labels = axis.get_legend_handles_labels()
        named.update(zip(labels, handles, strict=True))
    figure.legend(list(named.values()), list(named), loc="outside lower center", ncols=4, frameon=False)
    return figure


def _lines(axis: Any, names: list[str], points: list[Point], x: Callable[[Any], float]) -> None:
    """A line for each cache, the full one across."""
    for i, name in enumerate(names):
        mine = sorted(((x(row), value) for of, row, value in points if of == name), key=itemgetter(0))
        if not mine:
            continue
        middle = [value.mean for _, value in mine]
        bars = [[max(0.0, v.mean - v.low) for _, v in mine], [max(0.0, v.high - v.mean) for _, v in mine]]
        axis.errorbar([at for at, _ in mine], middle, yerr=bars, capsize=3, label=name, **_style(i))
        if name == FULL:
            axis.axhline(middle[0], color=_style(i)["color"], linewidth=0.8, linestyle="--")


def _speed(axis: Any, rows: Iterable[Row], rate: Callable[[Row], float | None]) -> None:
    """Of the full cache and of every policy that is no control, over the length."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        value = rate(row)
        if row.task == ALL and not row.variant.is_control and value is not None:
            kept = f"{row.kept:.0%}" if row.kept < 1 else show_kept(row.kept, row.budget)
            lines.setdefault(f"{row.variant.name} {kept}", []).append((row.length, value))
    for i, (label, points) in enumerate(lines.items()):
        axis.plot(*zip(*sorted(points), strict=True), label=label, **_style(i))
    axis.set_xlabel("tokens of history")
    axis.set_ylim(bottom=0)
    if lines:
        axis.legend(frameon=False, fontsize=8)


def _style(i: int) -> dict[str, str]:
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}


def _scaled(value: Interval, by: float) -> Interval:
    return Interval(by * value.mean, by * value.low, by * value.high, value.n)


def _share(row: Any) -> float:
    length: int = row.n_tokens if isinstance(row, Reading) else row.length
    return 100.0 * min(1.0, int(row.budget) / length)


def _mib(row: Any) -> float:
    n: int = row.kept_bytes
    return n / MIB
