"""Exit codes and texts for what users get wrong; no model needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_harness import RunCli, assert_refused


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--bogus"),
        ("run", "-t", "many", "-p", "hi"),
        ("run", "--top-p", "1.5", "-p", "hi"),
        ("summarize",),
        ("nonsense",),
    ],
)
def test_bad_flags_are_usage_errors(cli: RunCli, arguments: tuple[str, ...]) -> None:
    assert cli(*arguments).returncode == 2


def test_a_prompt_is_needed_and_only_one(cli: RunCli) -> None:
    assert_refused(cli("run"), 2, "there is no prompt")
    assert_refused(cli("run", "one", "-p", "two"), 2, "twice")
    assert_refused(cli("run", "--raw", "-sys", "x", "-p", "y"), 2, "contradict")


def test_a_pin_is_a_span(cli: RunCli) -> None:
    for text in ("all", "5", "9:5", "-1:5"):
        assert_refused(cli("run", f"--pin={text}", "-p", "hi"), 2, "FROM:TO")


def test_files_that_cannot_be_read_are_usage_errors(cli: RunCli, home: Path) -> None:
    (home / "binary").write_bytes(b"GGUF\0\0")
    assert_refused(cli("run", "-f", "missing.txt"), 2, "missing.txt", "no such file")
    assert_refused(cli("run", "-f", home), 2, "folder")
    assert_refused(cli("run", "-f", "binary"), 2, "not text")
    assert_refused(cli("summarize", "missing.txt"), 2, "no such file")


def test_an_empty_name_is_said_to_be_empty(cli: RunCli) -> None:
    for command in (("run", "-f", ""), ("chat", "-f", ""), ("summarize", "")):
        assert_refused(cli(*command), 2, "cannot read ''", "the name is empty")
    for command in (("run", "-p", "hi", "-m", ""), ("inspect", "")):
        assert_refused(cli(*command), 3, "the name is empty")


def test_without_a_model_the_command_that_fetches_it_is_named(cli: RunCli) -> None:
    assert_refused(cli("run", "-p", "hi"), 3, "h2o-gguf models fetch", "-m FILE")
    assert_refused(cli("chat"), 3, "h2o-gguf models fetch")
    assert_refused(cli("models", "path"), 3, "h2o-gguf models fetch")


@pytest.mark.parametrize("command", [("run", "-p", "hi", "-m"), ("inspect",)])
def test_broken_models_are_refused_with_the_reason(cli: RunCli, home: Path, command: tuple[str, ...]) -> None:
    (home / "empty.gguf").touch()
    (home / "four.gguf").write_bytes(b"GGUF")
    (home / "text.gguf").write_text("This is no model at all, whatever its name may be.")
    assert_refused(cli(*command, "empty.gguf"), 3, "empty.gguf", "empty")
    assert_refused(cli(*command, "four.gguf"), 3, "4 bytes")
    assert_refused(cli(*command, "text.gguf"), 3, "text.gguf")
    assert_refused(cli(*command, "missing.gguf"), 3, "no such file")
    assert_refused(cli(*command, home), 3, "folder")


def test_a_model_name_that_is_nearly_right_is_suggested(cli: RunCli) -> None:
    assert_refused(cli("models", "fetch", "smollm2-135"), 3, "smollm2-135m")
    assert_refused(cli("run", "-p", "hi", "-m", "nonsense"), 3, "the catalog has")


def test_the_package_runs_as_a_module(environment: dict[str, str], home: Path) -> None:
    command = [sys.executable, "-m", "h2o_gguf", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=home, check=True)
    assert done.stdout.startswith("h2o-gguf ")


def test_a_traceback_needs_verbose(cli: RunCli) -> None:
    done = cli("run", "-p", "hi", "-m", "missing.gguf", "-v")
    assert (done.returncode, done.stdout) == (3, "")
    assert "Traceback" in done.stderr
