"""Whether this CPU has the instructions the native library was compiled for."""

from __future__ import annotations

from pathlib import Path

__all__ = ["missing_features"]

FEATURES = "cpu-features.txt"  # beside the library, written by native/h2og.cmake: the compiler's names
CPUINFO = Path("/proc/cpuinfo")
LINUX_NAMES = {"sse3": "pni", "lzcnt": "abm", "bmi": "bmi1"}


def missing_features(folder: Path) -> list[str]:
    """What the library in this folder needs and this CPU lacks; nothing where that is not known."""
    try:
        needed = (folder / FEATURES).read_text(encoding="utf-8").split()
        lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another build, or no Linux
        return []
    found = {_plain(flag) for line in lines if line.startswith("flags") for flag in line.split()}
    return [name for name in needed if found and _plain(LINUX_NAMES.get(name, name)) not in found]


def _plain(name: str) -> str:
    """The name without underscores, which Linux and the compiler set differently."""
    return name.replace("_", "")
