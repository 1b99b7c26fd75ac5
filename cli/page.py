"""One HTML page that needs nothing else: a picture, tables, notes and advice."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from markupsafe import Markup

from h2o_gguf.cli.bench_files import NO_METADATA

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["make_page", "write_texts"]

WORDS = ("cache", "task")  # columns that are read, not compared


def make_page(
    title: str,
    figure: Figure,
    sheets: Sequence[Any],
    notes: Sequence[str],
    headline: str = "",
    reasons: Sequence[str] = (),
) -> str:
    """The page.  sheets : tables with title, head and rows. headline, reasons : the advice, if any."""
    svg = StringIO()
    figure.savefig(svg, format="svg", metadata=NO_METADATA)
    text = svg.getvalue()
    source = (Path(__file__).parent / "page.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, keep_trailing_newline=True).from_string(source)
    return template.render(
        title=title,
        svg=Markup(text[text.index("<svg") :].rstrip()),
        sheets=list(sheets),
        words=WORDS,
        notes=notes,
        headline=headline,
        reasons=reasons,
    )


def write_texts(prefix: Path, texts: dict[str, str]) -> list[Path]:
    """Write PREFIX.ENDING for each ending; return their paths."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for ending, text in texts.items():
        path = prefix.parent / f"{prefix.name}.{ending}"
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
