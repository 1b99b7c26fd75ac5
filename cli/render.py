"""What goes to stderr, and how numbers look."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from h2o_gguf.attic import AtticReport
from h2o_gguf.report import KVReport

__all__ = [
    "as_flags",
    "attic_lines",
    "bar",
    "complain",
    "evicted_line",
    "is_terminal",
    "kv_lines",
    "layer_classes",
    "notice",
    "show_bytes",
    "speed",
    "stderr",
    "where",
]

BAR_CELLS = 30
FLAGS = {
    "n_ctx": "--ctx-size",
    "layer_budgets": "--layer-budgets",
    "n_batch": "--batch-size",
    "n_ubatch": "--ubatch-size",
    "n_threads": "--threads",
    "kv_budget": "--kv-budget",
    "n_sink": "--kv-evict-sink",
    "n_recent": "--kv-evict-window",
    "type_k": "--cache-type-k",
    "type_v": "--cache-type-v",
    "policy='h2o+'": "--policy h2o+",
    "attic='ram'": "--attic ram",
    "attic": "--attic",
    "attic_limit": "--attic-limit",
    "attic_type": "--attic-type",
    "recall_every": "--recall-every",
    "flash_attn=True": "--flash-attn on",
    "flash_attn": "--flash-attn",
}


def stderr() -> Console:
    """A console on stderr: no colours when piped or with NO_COLOR, lines broken only for a person."""
    return Console(stderr=True, highlight=False, soft_wrap=not is_terminal())


def is_terminal() -> bool:
    """Whether a person reads stderr."""
    return sys.stderr.isatty()


def notice(text: str) -> None:
    """Say something beside the answer, quietly."""
    stderr().print(Text(text, style="dim"))


def complain(text: str) -> None:
    """Say what went wrong, with options named as on the command line."""
    stderr().print(Text.assemble(("error: ", "bold red"), as_flags(text)))


def show_bytes(n: int) -> str:
    """Bytes as a person reads them, in powers of 1,024."""
    if n < 1024:
        return f"{n} B"
    value, unit = n / 1024, "KiB"
    for bigger in ("MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.1f} {unit}"


def speed(n_tokens: int, seconds: float) -> str:
    """Tokens, seconds and tokens per second."""
    rate = n_tokens / seconds if seconds > 0 else 0.0
    return f"{n_tokens:,} {'token' if n_tokens == 1 else 'tokens'} in {seconds:.1f} s ({rate:.1f}/s)"


def bar(share: float, n_cells: int = BAR_CELLS) -> str:
    """A bar filled to `share`, 0 to 1."""
    filled = round(min(max(share, 0.0), 1.0) * n_cells)
    full, empty = ("█", "░") if _knows("█░") else ("#", ".")
    return full * filled + empty * (n_cells - filled)


def evicted_line(kv: KVReport) -> str:
    """What left the cache, in words."""
    if kv.policy == "none":
        return f"nothing was evicted: {kv.used:,} of {kv.budget:,} entries per KV head are used"
    if kv.evicted == 0:
        return f"nothing was evicted: {kv.used:,} entries per KV head, the budget is {kv.budget:,}"
    renumbered = f"; positions were renumbered {_times(kv.n_rebases)}" if kv.n_rebases else ""
    return (
        f"evicted by {kv.policy}: of {kv.n_past:,} tokens, {kv.used:,} entries per KV head are left "
        f"(budget {kv.budget:,}), {kv.evicted:,} are gone{renumbered}"
    )


def kv_lines(kv: KVReport) -> list[str]:
    """The cache, drawn."""
    share = kv.used / kv.budget if kv.budget else 0.0
    lines = [
        f"cache    {bar(share)} {kv.used:,} of {kv.budget:,} entries per KV head ({share:.0%})",
        f"tokens   {kv.n_past:,} came, {kv.evicted:,} of them are gone from each KV head",
        f"policy   {kv.policy}" + (" (a full cache is an error)" if kv.policy == "none" else ""),
        f"memory   {show_bytes(kv.bytes)}, allocated once; it never grows",
    ]
    if kv.layer_budgets:
        lines.insert(1, f"layers   {layer_classes(kv.layer_budgets)}")
    if kv.policy != "none":
        lines.append(f"renumbered positions: {_times(kv.n_rebases) if kv.n_rebases else 'not yet'}")
    if kv.attic is not None:
        lines += attic_lines(kv.attic)
    return lines


def attic_lines(attic: AtticReport) -> list[str]:
    """Where evicted entries are, and what came back."""
    dropped = f"; {attic.dropped:,} were dropped for want of space" if attic.dropped else ""
    return [
        f"attic    {attic.entries:,} evicted entries per KV head within reach, "
        f"{show_bytes(attic.bytes)} of {show_bytes(attic.limit)} {where(attic)}{dropped}",
        f"recalled {attic.recalled:,.1f} entries per KV head by the last turn",
    ]


def where(attic: AtticReport) -> str:
    """The place, in words."""
    return "on disk" if attic.place == "disk" else "in memory"


def layer_classes(budgets: Sequence[int]) -> str:
    """How many layers have which budget, the largest first."""
    counts = sorted(Counter(budgets).items(), reverse=True)
    return ", ".join(f"{budget:,} in {n} {'layer' if n == 1 else 'layers'}" for budget, n in counts)


def as_flags(text: str) -> str:
    """The text with the Python API's names for options replaced by the flags."""
    for name, flag in FLAGS.items():
        text = re.sub(rf"(?<![\w./'\"-]){re.escape(name)}(?![\w./'\"-]|\.\w)", flag, text)
    return text


def _times(n: int) -> str:
    return {1: "once", 2: "twice"}.get(n, f"{n:,} times")


def _knows(characters: str) -> bool:
    try:
        characters.encode(sys.stderr.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
