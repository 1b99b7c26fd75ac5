"""The command line as a user starts it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_harness import COMMAND, OpenTerminal, RunCli, Terminal, require_tmux
from llama_harness import find_model


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder without models or history; the tests' working folder."""
    return tmp_path


@pytest.fixture
def environment(home: Path) -> dict[str, str]:
    """The environment, without variables of ours or llama.cpp's."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in ("H2O_GGUF_LIB_PATH", "LLAMA_CPP_LIB_PATH")
        or not name.startswith(("LLAMA_ARG", "H2O_GGUF", "NO_COLOR", "FORCE_COLOR"))
    }
    return kept | {
        "H2O_GGUF_MODELS": str(home / "models"),
        "H2O_GGUF_HISTORY": str(home / "history"),
        "LC_ALL": "C.UTF-8",
        "LLAMA_ARG_THREADS": "1",  # two that wait for each other crawl on a busy machine
    }


@pytest.fixture
def cli(environment: dict[str, str], home: Path) -> RunCli:
    """Runs the command with arguments, stdin and extra environment; returns output and exit code."""

    def run(*arguments: object, stdin: str | bytes = "", **extra: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            capture_output=True,
            env=environment | extra,
            cwd=home,
            timeout=300,
            check=False,
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    return run


@pytest.fixture
def model() -> Path:
    """The default model; skips without it."""
    path = find_model()
    if path is None:
        pytest.skip("the default model is not here: run `h2o-gguf models fetch`, or set H2O_GGUF_TEST_MODEL")
    return path.resolve()


@pytest.fixture
def terminal(environment: dict[str, str], home: Path) -> Iterator[OpenTerminal]:
    """Starts the command in a real terminal; skips without tmux."""
    require_tmux()
    opened: list[Terminal] = []

    def start(*arguments: object, command: list[str] = COMMAND, **extra: str) -> Terminal:
        opened.append(Terminal([*command, *map(str, arguments)], environment | extra, home))
        return opened[-1]

    yield start
    for each in opened:
        each.close()
