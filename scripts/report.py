"""What every measurement tells beside its figures, and how it is written down."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path

from rich.progress import Progress

from h2o_gguf.bindings import version
from h2o_gguf.models.catalog import resolve

__all__ = ["arguments", "environment", "model_file", "progress", "save", "table"]


def model_file(name: str | None) -> str:
    """Path of a GGUF file or of a catalog model."""
    return str(resolve(name))


def arguments(args: argparse.Namespace) -> dict[str, object]:
    """The arguments of a measurement, without paths."""
    return {name: value for name, value in vars(args).items() if name not in ("model", "out")}


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar on the terminal; yields what moves it, called with (done, total)."""
    with Progress(transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda done, _total: bar.update(task, completed=done)


def environment(model: str, **more: object) -> dict[str, object]:
    """Machine, versions and model, without anything personal."""
    digest = hashlib.sha256(Path(model).read_bytes()).hexdigest()
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in _read("/proc/cpuinfo").splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    cores = sum(line.startswith("processor") for line in _read("/proc/cpuinfo").splitlines())
    return {
        "date": date.today().isoformat(),
        "cpu": cpu,
        "cores": cores,
        "python": platform.python_version(),
        "runtime": version(),
        "model": Path(model).name,
        "model_sha256": digest,
        **more,
    }


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


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
