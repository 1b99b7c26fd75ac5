"""What every measurement tells beside its figures, and how it is written down."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.progress import Progress

from h2o_gguf.benchmark.machine import environment
from h2o_gguf.models.catalog import resolve

__all__ = ["arguments", "environment", "model_file", "progress", "save", "table"]


def model_file(name: str | None) -> str:
    """Path of a GGUF file or of a catalog model."""
    return str(resolve(name))


def arguments(args: argparse.Namespace) -> dict[str, object]:
    """The arguments of a measurement, without paths."""
    return {name: v for name, v in vars(args).items() if name != "model" and not isinstance(v, Path)}


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal; yields what moves it, called with (done, total)."""
    with Progress(transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done, _total: bar.update(task, completed=done)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)])


def save(out: Path | None, text: str, data: dict[str, object]) -> None:
    """Print the text; with out, write out.md and out.json."""
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
        out.with_suffix(".json").write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
