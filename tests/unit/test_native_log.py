"""What llama.cpp logs: kept for errors, shown to nobody who did not ask."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import require_runtime
from tiny_models import build

from h2o_gguf.native_log import NativeLog

WARN, ERROR = 3, 4


def test_the_reason_is_the_first_error_without_the_function() -> None:
    log = NativeLog()
    assert log.reason("none") == "none"
    log.add(WARN, "a warning")
    assert log.reason("none") == "a warning"
    log.add(ERROR, "llama_model_load: error loading model: no such layer")
    log.add(ERROR, "llama_model_load: failed")
    assert log.reason("none") == "no such layer"


@pytest.mark.parametrize(
    ("ask", "is_heard"),
    [
        ("", False),
        ("import logging; logging.getLogger('llama-cpp-python').setLevel(logging.DEBUG)", True),
    ],
)
def test_native_lines_are_shown_to_those_who_ask(tmp_path: Path, ask: str, is_heard: bool) -> None:
    require_runtime()
    path = build("llama", tmp_path / "m.gguf")
    code = f"""
from h2o_gguf.native import C
{ask}
C.llama_model_free(C.llama_model_load_from_file({str(path)!r}.encode(), C.llama_model_default_params()))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=True
    )
    assert done.stdout == ""
    assert ("general.architecture" in done.stderr) == is_heard and bool(done.stderr) == is_heard


def test_ctrl_c_in_a_line_that_is_logged_comes_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes swallows what is raised in a callback."""
    require_runtime()
    from h2o_gguf import native

    class Press(NativeLog):
        def add(self, level: int, line: str) -> None:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(native, "_listeners", [Press()])
    try:
        with pytest.raises(KeyboardInterrupt):
            native._on_line(WARN, b"a line", None)
            time.sleep(5)
    finally:
        signal.signal(signal.SIGINT, before)
