"""Ctrl-C at any time: 130, nothing on stderr, within a second or two."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_harness import COMMAND
from harness import require_runtime
from tiny_models import build

PATIENCE_S = 5.0  # of a busy machine; what is interrupted would take a minute

# Native code that never returns and hears no signal: a lock that is taken twice.
STUCK = """
import ctypes, sys
import h2o_gguf.llama

def get_stuck(*args, **options):
    lock = ctypes.create_string_buffer(256)
    print("loading", file=sys.stderr, flush=True)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(lock)

h2o_gguf.llama.H2OLlama = get_stuck
sys.argv = ["h2o-gguf", "run", "-m", sys.argv[1], "hi"]
from h2o_gguf.cli.__main__ import main
main()
"""

# A call whose native code reads the token, and that no handler of a signal can interrupt.
READING = """
import ctypes, os, threading, time
from h2o_gguf.cli.interrupt import cancel_on_interrupt

def tell(cancel):
    while not cancel.cancelled:
        time.sleep(0.01)
    print("cancelled", flush=True)
    os._exit(0)

with cancel_on_interrupt() as cancel:
    threading.Thread(target=tell, args=(cancel,), daemon=True).start()
    lock = ctypes.create_string_buffer(256)
    print("reading", flush=True)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""


def assert_leaves(process: subprocess.Popen[str]) -> str:
    """The process ends soon with 130; returns the rest of its stderr."""
    process.send_signal(signal.SIGINT)
    start_s = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert time.monotonic() - start_s < PATIENCE_S
    assert "Traceback" not in stderr and "KeyboardInterrupt" not in stderr
    return stderr


def start(command: list[str], environment: dict[str, str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command, env=environment, cwd=folder, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.parametrize("module", ["typer", "numpy", "gguf.constants", "rich.console", "h2o_gguf.cli.app"])
@pytest.mark.parametrize("command", [("chat",), ("models", "list"), ("--version",)])
def test_start_up_is_left_quietly(
    environment: dict[str, str], home: Path, command: tuple[str, ...], module: str
) -> None:
    interpreter, *rest = COMMAND
    with start([interpreter, "-X", "importtime", *rest, *command], environment, home) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).rstrip().endswith(f" {module}"):
            assert line, f"{module} is not imported"
        lines = assert_leaves(process).splitlines()
    assert all(line.startswith("import time:") for line in lines)


def test_native_code_that_hears_no_handler_is_left(environment: dict[str, str], home: Path) -> None:
    require_runtime()
    model = build("llama", home / "tiny.gguf")
    with start([sys.executable, "-c", STUCK, str(model)], environment, home) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading\n"
        assert assert_leaves(process) == ""


def test_a_call_is_cancelled_while_native_code_runs(environment: dict[str, str], home: Path) -> None:
    with start([sys.executable, "-c", READING], environment, home) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60)[0] == "cancelled\n"
        assert process.returncode == 0


def test_waiting_for_stdin_is_left(environment: dict[str, str], model: Path, home: Path) -> None:
    command = [*COMMAND, "summarize", "-", "-m", str(model), "--kv-budget", "512"]
    with subprocess.Popen(
        command, env=environment, cwd=home, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        process.stdin.write("The fox went to the sea.\n")
        process.stdin.flush()
        time.sleep(3)  # now it waits for more
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=PATIENCE_S) == 130
        assert process.stderr is not None and process.stderr.read() == ""


@pytest.mark.parametrize("delay_s", [0.1, 0.2, 0.4, 0.8, 1.6])
def test_a_chat_is_left_quietly_after_any_time(
    environment: dict[str, str], model: Path, home: Path, delay_s: float
) -> None:
    command = [*COMMAND, "run", "-m", str(model), "-p", "Tell a long story.", "-n", "2000"]
    with start(command, environment, home) as process:
        time.sleep(delay_s)
        assert_leaves(process)
