"""The command line in a real terminal."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "h2o_gguf.cli"]
RunCli = Callable[..., "subprocess.CompletedProcess[str]"]
OpenTerminal = Callable[..., "Terminal"]
PROMPT = r"^> ?\Z"  # the last line of the screen


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """The command said why, on stderr, without a traceback."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def require_tmux() -> None:
    """Skip without tmux."""
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed: terminal tests need a terminal")


class Terminal:
    """A command in a tmux window of 100 columns and 50 lines."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self._folder = tempfile.mkdtemp(prefix="h2og-tmux-")
        self._environment = environment
        line = f"{shlex.join(command)}; echo EXIT $?; exec sleep 600"
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "50", "-c", str(folder), line)

    def type(self, *keys: str) -> None:
        """Press keys, by tmux's names."""
        self._tmux("send-keys", *keys)

    def enter(self, text: str) -> None:
        """Type a line and press Enter."""
        self._tmux("send-keys", "-l", text)
        self._tmux("send-keys", "Enter")

    def paste(self, text: str) -> None:
        """Paste as terminals do for programs that ask for bracketed paste."""
        self._tmux("set-buffer", text)
        self._tmux("paste-buffer", "-p")

    def screen(self) -> str:
        """What is to be seen, history included."""
        return self._tmux("capture-pane", "-p", "-J", "-S", "-500").rstrip()

    def wait(self, pattern: str, timeout_s: float = 120.0) -> str:
        """Wait until the screen matches; return it."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            screen = self.screen()
            if re.search(pattern, screen, re.MULTILINE):
                return screen
            time.sleep(0.1)
        pytest.fail(f"{pattern!r} did not appear:\n{self.screen()}")

    def close(self) -> None:
        """End the command and the window."""
        subprocess.run([*self._server(), "kill-server"], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _server(self) -> list[str]:
        return ["tmux", "-S", f"{self._folder}/socket"]

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            [*self._server(), *arguments], capture_output=True, text=True, env=self._environment, check=True
        )
        return done.stdout
