"""Ctrl-C while a model is made: llama.cpp calls Python back, and what is raised in there would be lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from harness import require_runtime
from tiny_models import build

PRESS = """
import logging, signal, sys

class Press(logging.Handler):
    pressed = False

    def emit(self, record):
        print(record.getMessage())
        if sys.argv[2] in record.getMessage() and not self.pressed:
            self.pressed = True
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
log = logging.getLogger("h2o_gguf.native")
log.setLevel(logging.DEBUG)
log.addHandler(Press())
from h2o_gguf import H2OLlama

try:
    H2OLlama(sys.argv[1], kv_budget=64, n_threads=1)
except KeyboardInterrupt:
    print("INTERRUPTED")
with H2OLlama(sys.argv[1], kv_budget=64, n_threads=1) as llama:
    print(llama("abc", max_tokens=1)["usage"]["completion_tokens"], "TOKEN")
"""

CANCEL = """
import logging, sys
from h2o_gguf import CancelToken, H2OLlama

logging.basicConfig(level=logging.DEBUG)
log = logging.getLogger("h2o_gguf.native")
log.setLevel(logging.ERROR)
with H2OLlama(sys.argv[1], kv_budget=64, n_threads=1) as llama:
    token = CancelToken()
    token.cancel()
    print(llama.engine.context.decode([70, 71], 0, cancel=token))
    log.setLevel(logging.DEBUG)
    llama.engine.context.decode([70, 71], 0, cancel=token)
"""


def test_what_llama_cpp_says_of_a_cancelled_call_is_no_error(tmp_path: Path) -> None:
    require_runtime()
    done = subprocess.run(
        [sys.executable, "-c", CANCEL, str(build("llama", tmp_path / "tiny.gguf"))],
        capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == "2\n"
    quiet, _, loud = done.stderr.partition("DEBUG:h2o_gguf.native:")
    assert quiet == "" and "ret = 2" in loud


@pytest.mark.parametrize(
    ("line", "is_cut_short"), [("load_tensors", True), ("llama_context", False), ("sched_reserve", False)]
)
def test_ctrl_c_while_a_model_is_made_is_not_lost(tmp_path: Path, line: str, is_cut_short: bool) -> None:
    require_runtime()
    model = build("llama", tmp_path / "tiny.gguf")
    done = subprocess.run(
        [sys.executable, "-c", PRESS, str(model), line],
        capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert "INTERRUPTED\n" in done.stdout and "1 TOKEN\n" in done.stdout
    assert ("cancelled model load" in done.stdout) == is_cut_short
    assert done.stderr == ""
