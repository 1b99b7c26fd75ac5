"""A comparison as a table: for a terminal, for Markdown and for HTML."""

from __future__ import annotations

import sys
from html import escape
from io import StringIO

from rich import box
from rich.console import Console
from rich.table import Table

from h2o_gguf.benchmark.results import Report, Row, Section, Spread
from h2o_gguf.cli.render import show_bytes

__all__ = ["as_html", "as_markdown", "notes", "show"]

WIDE = 10_000  # characters: nobody breaks lines
NONE = "-"
HEAD = (
    "history", "cache", "decode\ntok/s", "ratio", "prefill\ntok/s", "ratio", "first\ntoken s",
    "KV", "RSS", "attention\nGB/s", "of\nmemory",
)  # fmt: skip


def show(report: Report) -> None:
    """The table and its notes on stdout; Markdown when piped, medians alone where no more fits."""
    if not sys.stdout.isatty():
        sys.stdout.write(as_markdown(report))
        return
    console = Console(highlight=False)
    table = _table(report, box.SIMPLE_HEAD)
    if console.measure(table, options=console.options.update(width=WIDE)).maximum > console.width:
        table = _table(report, box.SIMPLE_HEAD, is_brief=True)
    console.print(table)
    for note in notes(report):
        console.print(f"- {note}", markup=False)


def as_markdown(report: Report) -> str:
    """Table and notes."""
    console = Console(file=StringIO(), width=WIDE, color_system=None)
    console.print(_table(report, box.MARKDOWN))
    assert isinstance(console.file, StringIO)
    table = "\n".join(line.rstrip() for line in console.file.getvalue().strip().splitlines())
    return "\n".join([table, "", *(f"- {note}" for note in notes(report))]) + "\n"


def as_html(report: Report) -> str:
    """Table and notes, as elements of a page."""
    head = "".join(f"<th>{escape(name)}</th>" for name in HEAD)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(section, row)) + "</tr>"
        for section in report.sections
        for row in section.rows
    )
    items = "".join(f"<li>{escape(note)}</li>" for note in notes(report))
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>\n<ul>{items}</ul>"


def notes(report: Report) -> list[str]:
    """What a reader of the figures must know."""
    about, settings = report.environment, report.settings
    types = " and ".join(dict.fromkeys((settings["type_k"], settings["type_v"])))
    cpu = f"{about['cpu']}, {about['cores']} CPUs, threads: {settings['n_threads']}"
    first = report.sections[0].rows[0].variant
    scale = (
        "an unmodified build of the same version"
        if settings["stock"]
        else "this runtime with no cache attached, so that the graph is llama.cpp's own"
    )
    speeds = ", ".join(_quartiles(section.read_bandwidth, 1e-9) for section in report.sections)
    costs = [
        f"{section.history:,}: decode {_range(cost.decode)}, prefill {_range(cost.prefill)}"
        for section in report.sections
        if (cost := section.scores_cost) is not None
    ]
    return [
        f"{about['model']}, {types} cache, {about['date']}, {cpu}, {about['runtime']}.",
        f'"{first}" is {scale}, with flash attention.',
        f"Repetitions, in turns: {settings['repeats']}; histories of more than 2,048 tokens are read once. "
        "Medians with quartiles; a ratio is the median of those "
        f'to "{first}" in each repetition, with their range.',
        "Decoding includes its share of evictions. RSS is the peak of a process, the model's file included.",
        "Attention: bytes of K and V beyond those of 64 tokens, over the time beyond that of a token then. "
        f"Of memory: of what as many threads read in the same turns, {speeds} GB/s.",
        *([f"Time with scores over time without, {'; '.join(costs)}."] if costs else []),
    ]


def _table(report: Report, style: box.Box, *, is_brief: bool = False) -> Table:
    table = Table(box=style, padding=(0, 0 if is_brief else 1), pad_edge=not is_brief)
    for i, name in enumerate(HEAD):
        title = name.replace("\n", " ") if style is box.MARKDOWN else name
        table.add_column(title, justify="left" if i == 1 else "right", overflow="fold")
    for section in report.sections:
        for row in section.rows:
            table.add_row(
                *_cells(section, row, is_brief),
                end_section=row is section.rows[-1] and style is not box.MARKDOWN,
            )
    return table


def _cells(section: Section, row: Row, is_brief: bool = False) -> list[str]:
    def quartiles(spread: Spread, scale: float = 1.0) -> str:
        return _quartiles(spread, scale, is_brief)

    def ratio(spread: Spread) -> str:
        return _range(spread, is_brief)

    return [
        f"{section.history:,}",
        row.variant + ("" if row.budget is None else f" ({row.budget:,})"),
        quartiles(row.decode_rate),
        ratio(row.decode_speedup),
        quartiles(row.prefill_rate),
        ratio(row.prefill_speedup),
        f"{row.first_token_s.median:.3g}",
        show_bytes(row.kv_bytes),
        show_bytes(row.rss_bytes),
        NONE if row.attention_rate is None else quartiles(row.attention_rate, 1e-9),
        NONE if row.bandwidth_share is None else f"{row.bandwidth_share.median:.0%}",
    ]


def _quartiles(spread: Spread, scale: float = 1.0, is_brief: bool = False) -> str:
    return _with(spread, (spread.q1, spread.q3), scale, ".1f", is_brief)


def _range(spread: Spread, is_brief: bool = False) -> str:
    return _with(spread, (spread.min, spread.max), 1.0, ".2f", is_brief)


def _with(spread: Spread, ends: tuple[float, float], scale: float, form: str, is_brief: bool) -> str:
    """The median, with what lies around it where there is more than one value and room."""
    low, middle, high = (format(x * scale, form) for x in (ends[0], spread.median, ends[1]))
    return middle if spread.n == 1 or is_brief else f"{middle} ({low} .. {high})"
