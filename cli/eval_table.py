"""An evaluation as tables: for a terminal, for Markdown and for HTML."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table

from h2o_gguf.cli.render import show_bytes
from h2o_gguf.evaluation.cells import Kept
from h2o_gguf.evaluation.evaluation import Report
from h2o_gguf.evaluation.recommendation import Recommendation
from h2o_gguf.evaluation.side_by_side import Reading
from h2o_gguf.evaluation.statistics import Interval
from h2o_gguf.evaluation.summary import ALL, Row

__all__ = [
    "Sheet", "as_markdown", "notes", "print_sheets", "sheets", "show", "show_growth", "show_interval",
    "show_kept", "write_markdown",
]  # fmt: skip

WIDE = 10_000  # characters: nobody breaks lines
SCORES = (
    "length", "cache", "kept", "task", "score (95 %)", "loss, points (95 %)", "n", "KV kept", "KV peak",
    "read tok/s", "first token s", "write tok/s",
)  # fmt: skip
TEXTS = (
    "cache", "kept", "perplexity", "over full (95 %)", "nats by quarter", "KL to full", "top-1", "KV kept",
    "KV peak", "read tok/s", "write tok/s",
)  # fmt: skip


@dataclass(frozen=True)
class Sheet:
    """A table.  rows : texts."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def sheets(report: Report, *, is_brief: bool = False) -> Iterator[Sheet]:
    """The tables.  is_brief : without single tasks where there are several."""
    rows = report.rows
    if is_brief and len({row.task for row in rows}) > 2:
        rows = tuple(row for row in rows if row.task == ALL)
    if rows:
        title = f"Answers, {report.settings['mode']}, question {report.settings['question']}"
        yield Sheet(title, SCORES, tuple(_score_row(row) for row in rows))
    if report.fidelity:
        n = report.fidelity[0]
        title = f"A text of {n.n_tokens:,} tokens, the last {n.n_scored:,} compared"
        yield Sheet(title, TEXTS, tuple(_text_row(each) for each in report.fidelity))


def show(report: Report) -> None:
    """Tables, notes and recommendation on stdout; Markdown when piped."""
    if not sys.stdout.isatty():
        sys.stdout.write(write_markdown(report))
        return
    print_sheets(list(sheets(report, is_brief=True)), notes(report), report.recommendation)


def print_sheets(tables: Sequence[Sheet], said: Sequence[str], advice: Recommendation) -> None:
    """Tables, notes and advice for a terminal."""
    console = Console(highlight=False)
    for sheet in tables:
        console.print(_table(sheet, box.SIMPLE_HEAD))
    for note in said:
        console.print(f"- {note}", markup=False)
    console.print()
    console.print(advice.headline, style="bold", markup=False)
    for reason in advice.reasons:
        console.print(reason, markup=False)


def write_markdown(report: Report) -> str:
    """Tables, notes and recommendation."""
    return as_markdown(list(sheets(report)), notes(report), report.recommendation)


def as_markdown(tables: Sequence[Sheet], said: Sequence[str], advice: Recommendation) -> str:
    """Tables, notes and advice."""
    console = Console(file=StringIO(), width=WIDE, color_system=None)
    assert isinstance(console.file, StringIO)
    for sheet in tables:
        console.print(f"## {sheet.title}", markup=False)
        console.print(_table(sheet, box.MARKDOWN, is_titled=False))
    text = "\n".join(line.rstrip() for line in console.file.getvalue().strip().splitlines())
    lines = [*(f"- {note}" for note in said), "", "## Recommendation", "", f"**{advice.headline}**"]
    return "\n".join([text, "", *lines, *(f"\n{reason}" for reason in advice.reasons)]) + "\n"


def notes(report: Report) -> list[str]:
    """What a reader of the figures must know."""
    about, settings = report.environment, report.settings
    low = ", ".join(f"{task} at {n:,} ({score:.0%})" for n, task, score in report.floors)
    return [
        f"{about['model']}, sha256 {about['model_sha256'][:16]}, {about['date']}, {about['cpu']}, "
        f"{about['cores']} CPUs, threads: {settings['n_threads'] or 'physical cores'}, {about['runtime']}.",
        f"Samples of each task and length: {settings['n_samples']}, seed {settings['seed']}; batches of "
        f"{settings['n_batch']} tokens. Kept: the share of the length that stays, not that which goes.",
        f"Scores are shares of what was asked for; {ALL!r} is the mean of the tasks on which the full cache "
        "has 80 % or more. Losses are paired by sample; intervals are bootstrapped.",
        "Speeds were taken one after another while answering, those of the text in turns.",
        *(
            ["With an attic, what was evicted stays in the host's memory, beside what is shown as kept."]
            if any(each.variant.attic for each in report.recommendation.candidates)
            else []
        ),
        *([f"Floor, not counted, since the full cache itself fails: {low}."] if low else []),
    ]


def show_kept(kept: Kept, budget: int) -> str:
    """A budget: share and entries."""
    if kept == 1.0 and isinstance(kept, float):
        return "all"
    return f"{kept:.0%} ({budget:,})" if kept < 1 else f"{budget:,}"


def _score_row(row: Row) -> tuple[str, ...]:
    return (
        f"{row.length:,}",
        row.variant.name,
        show_kept(row.kept, row.budget),
        row.task,
        show_interval(row.score),
        "" if row.variant.is_reference or row.loss is None else show_interval(row.loss),
        str(row.score.n),
        show_bytes(row.kept_bytes),
        show_bytes(row.peak_bytes),
        f"{row.read_rate:.1f}",
        f"{row.first_token_s:.2f}",
        "-" if row.write_rate is None else f"{row.write_rate:.1f}",
    )


def _text_row(each: Reading) -> tuple[str, ...]:
    return (
        each.variant.name,
        show_kept(each.kept, each.budget),
        f"{each.perplexity:.2f}",
        "" if each.variant.is_reference else show_growth(each.ratio),
        " ".join(f"{nats:.2f}" for nats in each.buckets),
        f"{each.kl:.4f}",
        f"{each.top1:.1%}",
        show_bytes(each.kept_bytes),
        show_bytes(each.peak_bytes),
        f"{each.read_rate:.1f}",
        f"{each.write_rate:.1f}",
    )


def show_interval(value: Interval) -> str:
    """A share and its interval, in percent."""
    return f"{100 * value.mean:.1f} ({100 * value.low:.1f} .. {100 * value.high:.1f})"


def show_growth(ratio: Interval) -> str:
    """What a ratio has more than 1, and its interval."""
    return f"{ratio.mean - 1:+.1%} ({ratio.low - 1:+.1%} .. {ratio.high - 1:+.1%})"


def _table(sheet: Sheet, style: box.Box, *, is_titled: bool = True) -> Table:
    table = Table(box=style, title=sheet.title if is_titled else None, title_justify="left")
    for name in sheet.head:
        table.add_column(name, justify="left" if name in ("cache", "task") else "right", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row)
    return table
