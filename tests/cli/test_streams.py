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
    return build("llama", tmp_path_factory.mktemp("models") / "m.gguf", n_ctx_train=1024)


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


COMMANDS = (
    "--help",
    "--version",
    "run --help",
    "inspect MODEL",
    "models list",
    "run --raw -m MODEL -n 2 hello",
)
needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")


def exit_code(line: str, command: str, model: Path, folder: Path, **environment: str) -> tuple[int, str]:
    """The exit code of a command in a line of bash, and what is left of stderr."""
    line = line.replace("COMMAND", f"{COMMAND} {command.replace('MODEL', str(model))}")
    done = shell(line, folder, **environment)
    stderr = done.stderr.decode()
    assert "bug" not in stderr and "Traceback" not in stderr and "Exception" not in stderr
    return done.returncode, stderr


@needs_full
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_said_in_words(model: Path, tmp_path: Path, command: str, unbuffered: str) -> None:
    code, stderr = exit_code(
        "COMMAND </dev/null >/dev/full", command, model, tmp_path, PYTHONUNBUFFERED=unbuffered
    )
    assert code == 4
    assert stderr == "error: the answer cannot be written: No space left on device\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_reader_that_has_gone_ends_a_command_quietly(model: Path, tmp_path: Path, command: str) -> None:
    assert exit_code("COMMAND </dev/null | true; exit ${PIPESTATUS[0]}", command, model, tmp_path) == (0, "")


@needs_full
@pytest.mark.parametrize("stderr", ["2>/dev/full", "2> >(true)", "2>&-"])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        *((command, 0) for command in COMMANDS),
        ("run --bogus", 2),
        ("run --raw -m missing.gguf hello", 3),
        ("run --raw -m MODEL --policy none -c 8 a-longer-prompt-than-that", 4),
    ],
)
def test_a_command_goes_on_without_stderr(
    model: Path, tmp_path: Path, command: str, code: int, stderr: str
) -> None:
    assert exit_code(f"COMMAND </dev/null >out {stderr}", command, model, tmp_path) == (code, "")
    assert bool((tmp_path / "out").read_bytes()) == (code == 0)


@needs_full
def test_a_full_disk_for_both_is_still_4(model: Path, tmp_path: Path) -> None:
    assert exit_code("COMMAND >/dev/full 2>/dev/full", "inspect MODEL", model, tmp_path) == (4, "")


@pytest.mark.parametrize("streams", [">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_lead_nowhere(model: Path, tmp_path: Path, streams: str) -> None:
    for command in COMMANDS:
        assert exit_code(f"COMMAND </dev/null {streams}", command, model, tmp_path)[0] == 0
        assert exit_code(f"COMMAND {streams}", "inspect missing.gguf", model, tmp_path)[0] == 3


@pytest.mark.parametrize(
    "command",
    [
        "run --raw -m MODEL -n 2 $'\\xff' </dev/null",
        "run -m MODEL -n 2 -sys $'\\xff' -p $'\\xff' </dev/null",
        "chat -m MODEL -n 2 -sys $'\\xff' -p $'\\xff' </dev/null",
        "summarize $'d\\xff.txt' -m MODEL -n 2 --kv-budget 400 -p $'\\xff' --instruction $'\\xff'",
        "inspect $'m\\xff.gguf' --json",
        "run --raw --json -m $'m\\xff.gguf' -n 2 -f $'d\\xff.txt' </dev/null",
    ],
)
def test_arguments_need_not_be_utf8(model: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / os.fsdecode(b"m\xff.gguf")).symlink_to(model)
    (tmp_path / os.fsdecode(b"d\xff.txt")).write_text("The fox went to the sea.")
    assert exit_code("COMMAND", command, model, tmp_path)[0] == 0


def test_lines_of_a_chat_need_not_be_utf8_and_it_is_said(model: Path, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"d\xff.txt")).write_text("The fox went to the sea.")
    lines = "printf 'caf\\xe9\\n/read d\\xff.txt\\n/system caf\\xe9\\nhello\\n/kv\\n'"
    code, stderr = exit_code(f"{lines} | COMMAND", "chat -m MODEL -n 2 -b 64", model, tmp_path)
    assert code == 0, stderr
    assert "conversation: 5 messages" in stderr
    assert stderr.count("the message is not all UTF-8") == 1
    assert "d\ufffd.txt (24 characters) goes with your next message" in stderr


def test_an_encoding_that_lacks_a_character_replaces_it(model: Path, tmp_path: Path) -> None:
    done = shell(
        f"{COMMAND} run --raw -m {model} -n 20 'é' </dev/null",
        tmp_path,
        PYTHONIOENCODING="ascii",
        PYTHONUTF8="0",
    )
    assert done.returncode == 0, done.stderr
