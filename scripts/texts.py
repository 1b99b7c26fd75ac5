"""Long texts that every Python brings, for measurements: English prose and code."""

from __future__ import annotations

import argparse
import ast
import pydoc_data.topics
import textwrap
from pathlib import Path

__all__ = ["code", "prose"]


def prose() -> str:
    """The language reference as pydoc shows it: about 465,000 characters of English."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def code() -> str:
    """Modules of the standard library, one after another: about 500,000 characters."""
    folder = Path(ast.__file__).parent
    names = [
        "ast",
        "textwrap",
        "argparse",
        "dataclasses",
        "heapq",
        "json/decoder",
        "statistics",
        "inspect",
        "typing",
    ]
    return "\n\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in names)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=textwrap.dedent(__doc__ or ""))
    parser.add_argument("which", choices=["prose", "code"])
    print({"prose": prose, "code": code}[parser.parse_args().which]())
