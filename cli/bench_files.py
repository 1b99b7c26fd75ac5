"""A comparison as files: JSON, Markdown, a picture, and a page that needs nothing else."""

from __future__ import annotations

import json
from html import escape
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from h2o_gguf.benchmark.results import Report, Spread
from h2o_gguf.cli.bench_table import as_html, as_markdown
from h2o_gguf.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "MARKERS", "NO_METADATA", "require_out", "write_files"]

TITLE = "Speed and memory by length of history"
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }
svg { max-width: 100%; height: auto; }
div { overflow-x: auto; }
table { border-collapse: collapse; white-space: nowrap; font-variant-numeric: tabular-nums; }
th, td { padding: .3em .7em; text-align: right; border-bottom: 1px solid #ddd; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
"""
COLOURS = (
    "#666666",
    "#0072b2",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#e69f00",
)  # Okabe and Ito's: told apart by all
MARKERS = "osD^vP"
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # of a picture inside a page


def require_out(prefix: Path) -> None:
    """Make the folder of PREFIX.*; to be called before what takes long.

    Raises: OptionError, it names no file, nothing can be written there, or there is nothing to draw with.
    """
    if find_spec("matplotlib") is None:
        raise OptionError(
            "--out draws with matplotlib, which is not installed: pip install 'h2o-gguf[plots]', "
            "or leave --out away and take --json",
            "out",
        )
    if prefix.name in ("", ".."):
        raise OptionError(f"--out is {str(prefix)!r}: it must end with the start of the files' names", "out")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=prefix.parent).close()
    except OSError as error:
        raise OptionError(
            f"cannot write {str(prefix)!r}: {error.strerror or error}; name another place with --out", "out"
        ) from error


def write_files(report: Report, prefix: Path) -> list[Path]:
    """Write PREFIX.json, .md, .png and .html; return their paths."""
    figure = _draw(report)
    png, svg = prefix.parent / f"{prefix.name}.png", StringIO()
    figure.savefig(png, dpi=150)
    figure.savefig(svg, format="svg", metadata=NO_METADATA)
    texts = {
        "json": json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n",
        "md": as_markdown(report),
        "html": _page(report, svg.getvalue()),
    }
    written = [png]
    for ending, text in texts.items():
        path = prefix.parent / f"{prefix.name}.{ending}"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return sorted(written)


def _page(report: Report, svg: str) -> str:
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>{TITLE}: {escape(str(report.environment["model"]))}</title>
<style>{STYLE}</style>
<h1>{TITLE}</h1>
{svg[svg.index("<svg") :].rstrip()}
<div>{as_html(report)}</div>
</html>
"""


def _draw(report: Report) -> Figure:
    """Decoding, reading and memory over the history, a line for each variant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.5), layout="constrained")
    axes = figure.subplots(1, 3)
    for i, first in enumerate(report.sections[0].rows):
        rows = [(s.history, row) for s in report.sections for row in s.rows if row.variant == first.variant]
        colour, marker = COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]
        style = {"color": colour, "marker": marker, "label": first.variant}
        _line(axes[0], [(n, row.decode_rate) for n, row in rows], style)
        _line(axes[1], [(n, row.prefill_rate) for n, row in rows], style)
        axes[2].plot([n for n, _ in rows], [row.kv_bytes / 2**20 for _, row in rows], **style)
    for axis, title in zip(axes, ("decode, tokens/s", "prefill, tokens/s", "KV cache, MiB"), strict=True):
        axis.set_title(title)
        axis.set_xlabel("tokens of history")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[2].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def _line(axis: Any, points: list[tuple[int, Spread]], style: dict[str, Any]) -> None:
    """Medians, with quartiles as bars."""
    middle = [spread.median for _, spread in points]
    bars = [[s.median - s.q1 for _, s in points], [s.q3 - s.median for _, s in points]]
    axis.errorbar([n for n, _ in points], middle, yerr=bars, capsize=3, **style)
