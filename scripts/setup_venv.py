"""Make the virtual environment in FOLDER, or say what this machine lacks for it."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import venv
from pathlib import Path


def missing() -> str | None:
    """Return what has to be installed first, or None."""
    if sys.version_info < (3, 10):  # noqa: UP036 - this runs before anything has checked
        found = sys.version.split()[0]
        return f"Python 3.10 or newer is needed, this is {found}: name another with `make PYTHON=...`"
    if importlib.util.find_spec("ensurepip") is None:
        return (
            "this Python has no ensurepip, so a virtual environment would have no pip: install it with "
            "`apt-get install python3-venv` (Debian, Ubuntu), or name another Python with `make PYTHON=...`"
        )
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        return "no C++ compiler is found: `apt-get install g++` (Debian, Ubuntu)"
    return None


def main() -> int:
    folder = Path(sys.argv[1])
    if problem := missing():
        print(f"error: {problem}", file=sys.stderr)
        return 1
    if not (folder / "bin" / "pip").exists():
        venv.create(folder, with_pip=True, clear=folder.exists())
    return 0


if __name__ == "__main__":
    sys.exit(main())
