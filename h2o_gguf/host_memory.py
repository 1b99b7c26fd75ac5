"""How much memory this process may still take, and whether a cache fits into it."""

from __future__ import annotations

import os
from pathlib import Path

from h2o_gguf.errors import OutOfMemoryError

__all__ = ["available_bytes", "require_bytes"]

MEMINFO = Path("/proc/meminfo")
CONTROL_GROUP = Path("/sys/fs/cgroup")  # of a container, which sees its own group here


def available_bytes() -> int | None:
    """Bytes that can be taken without ending a process: free memory, caches and swap; None if unknown."""
    found = [n for n in (_machine(), _control_group()) if n is not None]
    return min(found, default=None)


def require_bytes(n_bytes: int, n_cells: int, *, has_budget: bool) -> None:
    """Raise OutOfMemoryError unless there are n_bytes for a cache of n_cells.

    has_budget : the cells are those of a budget, not of a whole context.
    """
    n_available = available_bytes()
    if n_available is not None and n_bytes > n_available:
        hint = "lower kv_budget" if has_budget else "lower n_ctx, or keep less of it with a kv_budget"
        raise OutOfMemoryError(
            f"a cache of {n_cells:,} cells takes {n_bytes:,} bytes and {n_available:,} are available: {hint}",
            n_bytes=n_bytes,
            n_available=n_available,
        )


def _machine() -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
        return sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:  # no Linux: all there is, which is never too little
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _control_group() -> int | None:
    try:
        limit = int((CONTROL_GROUP / "memory.max").read_text())  # "max" without one
        stat = dict(line.split() for line in (CONTROL_GROUP / "memory.stat").read_text().splitlines())
        return max(0, limit - int((CONTROL_GROUP / "memory.current").read_text()) + int(stat["file"]))
    except (OSError, KeyError, ValueError):
        return None
