"""Answers that were cut."""

from __future__ import annotations

from typing import Protocol

import typer

from h2o_gguf.cli.render import complain, notice
from h2o_gguf.errors import NO_FIT
from h2o_gguf.report import KVReport

__all__ = ["say_cut", "why_full"]


class Cut(Protocol):
    """What a turn and a summary say of themselves."""

    @property
    def n_written(self) -> int: ...
    @property
    def is_cut_by_context(self) -> bool: ...


def say_cut(answer: Cut, kv: KVReport) -> None:
    """Say that the answer was cut, and how to get more; a full context ends the command with 4."""
    if not answer.is_cut_by_context:
        notice(f"the answer was cut at {answer.n_written:,} tokens; -n N allows more")
        return
    way = "raise n_ctx, or evict with policy='h2o+'" if kv.policy == "none" else "shorten prompt or document"
    complain(f"the answer was cut at {answer.n_written:,} tokens: {why_full(kv)}: {way}")
    raise typer.Exit(NO_FIT)


def why_full(kv: KVReport) -> str:
    """Why the sequence can hold no more; its last token is written, but not in the cache."""
    reason = "nothing may be evicted" if kv.policy == "none" else "the model's positions cannot be renumbered"
    return f"the context of {kv.n_past + 1:,} tokens is full and {reason}"
