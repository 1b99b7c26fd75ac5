"""A comparison as one table: quality, memory and speed of every cache; and as files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from h2o_gguf.cli.eval_table import (
    Sheet,
    as_markdown,
    notes,
    print_sheets,
    show_growth,
    show_interval,
    show_kept,
)
from h2o_gguf.cli.page import make_page, write_texts
from h2o_gguf.cli.render import show_bytes
from h2o_gguf.evaluation.evaluation import Report
from h2o_gguf.evaluation.side_by_side import Reading
from h2o_gguf.evaluation.summary import ALL, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["make_sheet", "show", "write_files"]

HEAD = (
    "cache", "kept", "KV kept", "of full", "KV peak", "score (95 %)", "loss, points (95 %)",
    "perplexity (95 %)", "KL to full", "top-1", "read tok/s", "write tok/s",
)  # fmt: skip
MIB = 2**20


def make_sheet(report: Report) -> Sheet:
    """The table, the full cache first; ratios of speed to it."""
    n = report.fidelity[0]
    scores = {
        (row.variant, row.kept): row
        for row in report.rows
        if row.task == ALL and row.length == max(report.settings["lengths"])
    }
    rows = tuple(_row(each, n, scores.get((each.variant, each.kept))) for each in report.fidelity)
    return Sheet(f"Ways to keep {n.n_tokens:,} tokens", HEAD, rows)


def show(report: Report) -> None:
    """The table, notes and recommendation on stdout; Markdown when piped."""
    sheet = make_sheet(report)
    if not sys.stdout.isatty():
        sys.stdout.write(as_markdown([sheet], notes(report), report.recommendation))
        return
    print_sheets([sheet], notes(report), report.recommendation)


def write_files(report: Report, prefix: Path) -> list[Path]:
    """Write PREFIX.json, .md and .html; return their paths."""
    sheet, advice = make_sheet(report), report.recommendation
    title = f"Full cache, window, small types, eviction: {report.environment['model']}"
    page = make_page(title, _draw(report), [sheet], notes(report), advice.headline, advice.reasons)
    data = json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n"
    return write_texts(
        prefix, {"html": page, "json": data, "md": as_markdown([sheet], notes(report), advice)}
    )


def _row(each: Reading, full: Reading, row: Row | None) -> tuple[str, ...]:
    return (
        each.variant.name,
        show_kept(each.kept, each.budget),
        show_bytes(each.kept_bytes),
        f"{each.kept_bytes / full.kept_bytes:.0%}",
        show_bytes(each.peak_bytes),
        "-" if row is None else show_interval(row.score),
        "" if row is None or row.loss is None or each is full else show_interval(row.loss),
        f"{each.perplexity:.2f}" if each is full else show_growth(each.ratio),
        f"{each.kl:.4f}",
        f"{each.top1:.1%}",
        f"{each.read_rate:.1f} ({each.read_rate / full.read_rate:.2f}x)",
        f"{each.write_rate:.1f} ({each.write_rate / full.write_rate:.2f}x)",
    )


def _draw(report: Report) -> Figure:
    """KL to the full cache over memory: the nearer to the lower left corner, the better."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), layout="constrained")
    axis = figure.subplots()
    for each in report.fidelity[1:]:
        x = each.kept_bytes / MIB
        axis.plot([x], [each.kl], "o", color="#0072b2" if not each.variant.is_control else "#666666")
        kept = "" if each.variant.is_full else f", {show_kept(each.kept, each.budget)}"
        axis.annotate(
            f"{each.variant.name}{kept}", (x, each.kl), xytext=(5, 3), textcoords="offset points", fontsize=8
        )
    axis.axvline(report.fidelity[0].kept_bytes / MIB, color="#666666", linewidth=0.8, linestyle="--")
    axis.set_title("KL to the full cache, nats, over memory; dashed: the full cache's memory")
    axis.set_xlabel("KV kept, MiB")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    return figure
