"""Long texts that every Python brings, English prose and code."""

from __future__ import annotations

import ast
import pydoc_data.topics
from pathlib import Path

__all__ = ["book", "code", "prose"]


def book() -> str:
    """The language reference as pydoc shows it, grammar and examples included: about 465,000 characters."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name].strip() for name in sorted(topics))


def prose() -> str:
    """Its paragraphs of running English: no grammar, no examples, no headings, each paragraph on one line."""
    seen: set[str] = set()  # several topics quote the same section
    kept = []
    for paragraph in book().split("\n\n"):
        lines = paragraph.splitlines()
        is_running = len(lines) > 1 and all(line[:1].strip() for line in lines)
        if (
            is_running
            and "::=" not in paragraph
            and paragraph not in seen
            and not set(lines[1]) <= set("*=-~")
        ):
            seen.add(paragraph)
            kept.append(" ".join(lines))
    return "\n\n".join(kept)


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
