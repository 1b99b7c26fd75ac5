"""Standard streams that are closed, full, or in another encoding are nobody's bug."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import build

COMMAND = f"{sys.executable} -m h2o_gguf.cli"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "m.gguf")


def shell(line: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        cwd=folder,
        env={**os.environ, "LLAMA_ARG_THREADS": "1", **environment},
        timeout=120,
        check=False,
    )


def test_closed_stdin_is_an_empty_one(model: Path, tmp_path: Path) -> None:
    done = shell(f"{COMMAND} run --raw -m {model} -n 2 hello <&-", tmp_path)
    assert done.returncode == 0, done.stderr


def test_closed_stderr_does_not_stop_the_answer(model: Path, tmp_path: Path) -> None:
    done = shell(f"{COMMAND} inspect {model} </dev/null 2>&-", tmp_path)
    assert done.returncode == 0
    assert b"evict" in done.stdout


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_said_in_words(model: Path, tmp_path: Path) -> None:
    done = shell(f"{COMMAND} inspect {model} >/dev/full", tmp_path)
    assert done.returncode == 4
    assert b"No space left" in done.stderr and b"bug" not in done.stderr and b"Traceback" not in done.stderr


def test_arguments_need_not_be_utf8(model: Path, tmp_path: Path) -> None:
    done = shell(f"{COMMAND} run --raw -m {model} -n 2 $'\\xff' </dev/null", tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_encoding_that_lacks_a_character_replaces_it(model: Path, tmp_path: Path) -> None:
    done = shell(
        f"{COMMAND} run --raw -m {model} -n 20 'é' </dev/null",
        tmp_path,
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )
    assert done.returncode == 0, done.stderr
