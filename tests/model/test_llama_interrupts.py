"""Ctrl-C while native code calls Python back: what is raised in there would be lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest
from harness import random_tokens, require_runtime
from llama_harness import open_tiny
from tiny_models import build

from h2o_gguf import context, native
from h2o_gguf.cancel import CancelToken

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


@pytest.mark.parametrize("policy", ["h2o", "lazy"])  # asked for victims; told of every batch as well
@pytest.mark.parametrize("act", ["read", "keep_budget"])
def test_ctrl_c_on_the_way_to_a_policy_is_told_once(policy: str, act: str, tmp_path: Path) -> None:
    """While its view is made, before any of its code runs."""
    with open_tiny("llama", tmp_path, policy=policy, kv_budget=32, n_batch=16, kv_block=8) as llama:
        engine, tokens = llama.engine, random_tokens(100)
        engine.prefill(tokens[:48])
        callbacks = engine.cache._callbacks
        view_of = callbacks._view

        def interrupt(native: Any) -> NoReturn:
            callbacks._view = view_of
            raise KeyboardInterrupt

        if act == "keep_budget":
            assert engine.context.decode(tokens[48:56], 48) == 0
            llama.n_tokens = 56
        callbacks._view = interrupt
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(tokens[48:64]) if act == "read" else engine.keep_budget()
        engine.sync(tokens[:70])
        assert engine.tokens == tokens[:70] and engine.context.n_past() == 70


def test_ctrl_c_before_a_batch_leaves_no_flag_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code would go on reading it when its owner is gone."""
    with open_tiny("llama", tmp_path, kv_budget=32) as llama:
        token, calls = CancelToken(), []

        class Interrupted:
            def __getattr__(self, name: str) -> Any:
                return getattr(native.C, name)

            def llama_set_abort_callback(self, *arguments: Any) -> None:
                calls.append(arguments)
                native.C.llama_set_abort_callback(*arguments)
                if len(calls) == 1:
                    raise KeyboardInterrupt

        monkeypatch.setattr(context, "C", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            llama.engine.context.decode([70, 71], 0, cancel=token)
        token.cancel()
        assert llama.engine.context.decode([70, 71], 0) == 0
