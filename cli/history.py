"""The file in which a chat keeps what was typed."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from h2o_gguf.cli.render import notice

__all__ = ["VARIABLE", "history_file"]

VARIABLE = "H2O_GGUF_HISTORY"


def history_file(wanted: bool) -> Path | None:
    """The file, made readable for its owner only; None without one.

    wanted : False with --no-history. $H2O_GGUF_HISTORY names another file; empty, it switches history off.
    """
    given = os.environ.get(VARIABLE)
    if not wanted or given == "":
        return None
    home = platformdirs.user_state_path("h2o-gguf", False)
    path = Path(os.path.expanduser(given)) if given else home / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
        if path.is_file():  # not /dev/null
            path.chmod(0o600)
        return path
    except OSError as error:
        notice(f"no history: {path} cannot be written for you alone ({error.strerror})")
        return None
