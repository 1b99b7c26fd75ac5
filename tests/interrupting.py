"""Ctrl-C before any line of the package."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import h2o_gguf

FOLDERS = tuple(str(Path(folder).resolve()) for folder in h2o_gguf.__path__)
NEVER = ("with ", "try:", "finally:")  # CPython hears of no signal there


def interrupted(n: int, act: Callable[[], Any], files: Sequence[str] = ()) -> bool:
    """Call act, with Ctrl-C before the n-th line of the package that it runs; False where it runs fewer.

    files : names of those whose lines count; all without.
    """
    n_left = n

    def trace(frame: FrameType, event: str, _arg: Any) -> Any:
        nonlocal n_left
        path = Path(frame.f_code.co_filename)
        if not str(path).startswith(FOLDERS) or (files and path.name not in files):
            return None
        line = linecache.getline(str(path), frame.f_lineno).lstrip()
        if event == "line" and not line.startswith(NEVER):
            n_left -= 1
            if n_left == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        act()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False
