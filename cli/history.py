"""The file in which a chat keeps what was typed."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from h2o_gguf.cli.render import notice

if TYPE_CHECKING:
    from prompt_toolkit.history import History

__all__ = ["VARIABLE", "history_file", "open_history"]

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
        if not path.is_file():  # /dev/null keeps nothing; nothing else is to be read to its end
            if os.fspath(path) != os.devnull:
                notice(f"no history: {path} is no file")
            return None
        path.chmod(0o600)
        return path
    except OSError as error:
        notice(f"no history: {path} cannot be written for you alone ({error.strerror})")
        return None


def open_history(path: Path | None) -> History:
    """What the line editor keeps its lines in; where the file fails, in memory from then on."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Kept(FileHistory):
        def load_history_strings(self) -> Iterable[str]:
            try:
                return list(super().load_history_strings())
            except OSError as error:
                self._say(error)
                return []

        def store_string(self, string: str) -> None:
            try:
                super().store_string(string)
            except OSError as error:
                self._say(error)

        def _say(self, error: OSError) -> None:
            if not has_said:
                has_said.append(True)
                notice(f"no history: {path} fails ({error.strerror})")

    has_said: list[bool] = []
    return InMemoryHistory() if path is None else Kept(str(path))
