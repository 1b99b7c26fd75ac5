"""Numbers that are too large, on the command line and in the model's file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from cli_harness import RunCli, assert_refused
from harness import require_runtime
from tiny_models import build
from tiny_models.decoders import DECODERS
from tiny_models.writer import Tiny

RUN = ("run", "-m", "tiny.gguf", "--raw", "-n", 1, "-p", "Hi")


@pytest.fixture(autouse=True)
def tiny(home: Path) -> None:
    require_runtime()
    build("llama", home / "tiny.gguf")


@pytest.mark.parametrize("flag", ["-c", "-b", "-ub"])
@pytest.mark.parametrize("policy", ["h2o+", "none"])
def test_sizes_of_more_than_31_bits_are_usage_errors(cli: RunCli, flag: str, policy: str) -> None:
    for n in (2**31, 2**32 - 1, 2**32, 2**32 + 300, 2**70):
        assert_refused(cli(*RUN, "--policy", policy, flag, n), 2, f"is {n}", "2,147,483,392")


def test_a_context_that_does_not_fit_into_memory_is_refused_before_it_is_allocated(cli: RunCli) -> None:
    # 2 layers, K and V, 2 heads of 64 in f16: a KiB a token
    assert_refused(
        cli(*RUN, "--policy", "none", "-c", 2_000_000_000), 4, "2,048,000,000,000 bytes", "lower --ctx-size"
    )


def test_a_batch_larger_than_the_context_is_one_that_fits(cli: RunCli) -> None:
    assert cli(*RUN, "-b", 1_000_000).returncode == 0
    assert_refused(cli(*RUN, "-b", 1_000_000, "--kv-budget", 100), 2, "lower --batch-size to 156")


def test_budget_errors_name_flags_and_numbers_that_are_taken(cli: RunCli) -> None:
    assert_refused(
        cli(*RUN, "--kv-budget", 300), 2, "256 positions the model knows: lower --kv-budget to 255"
    )
    assert_refused(
        cli(*RUN, "--kv-budget", 2), 2, "raise it (--kv-budget) to 4 or more, or lower --kv-evict-sink\n"
    )
    assert_refused(
        cli(*RUN, "--policy", "none", "--kv-budget", 30), 2, "leave --kv-budget out", "--policy h2o+"
    )
    done = cli("inspect", "tiny.gguf", "--kv-budget", 300)
    assert done.returncode == 0 and "lower --kv-budget to 255" in done.stdout


@pytest.mark.parametrize("n_ctx_train", [0, 2**32 - 1])
@pytest.mark.parametrize("command", [RUN, (*RUN, "--policy", "none"), ("inspect", "tiny.gguf")])
def test_a_model_with_an_absurd_context_is_its_files_fault(
    cli: RunCli, home: Path, n_ctx_train: int, command: tuple[object, ...]
) -> None:
    build("llama", home / "tiny.gguf", n_ctx_train=n_ctx_train)
    assert_refused(cli(*command), 3, f"llama.context_length is {n_ctx_train}", "damaged")


def test_a_model_with_a_very_short_context_runs_without_eviction(cli: RunCli, home: Path) -> None:
    build("llama", home / "tiny.gguf", n_ctx_train=12)
    done = cli(*RUN)
    assert done.returncode == 0 and "nothing will be evicted" in done.stderr


def test_what_llama_cpp_gives_up_on_is_said_in_one_line(cli: RunCli, home: Path) -> None:
    """A key_length that fits no tensor passes for a fact until llama.cpp builds its graph."""
    model = Tiny(home / "gpt2.gguf", n_layer=2, n_ctx_train=256, seed=0)
    DECODERS["gpt2"](model)
    model.set("attention.key_length", 7)
    model.write()
    done = cli("run", "-m", "gpt2.gguf", "--raw", "-p", "Hi")
    assert_refused(done, 3, "gpt2.gguf", "gpt2.cpp", "GGML_ASSERT", "damaged")
    assert done.stderr.count("\n") == 1


GIVE_UP = """
import sys
from pathlib import Path
from h2o_gguf.cli.aborts import explained_aborts

with explained_aborts(Path("model.gguf")):
    from h2o_gguf.native import C
sys.stdout.write("half an answer")
C._lib.ggml_abort(b"/somewhere/ggml.c", 7, b"impossible")
"""


def test_what_llama_cpp_gives_up_on_later_is_a_native_failure_and_the_answer_is_kept(
    environment: dict[str, str], home: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", GIVE_UP],
        capture_output=True,
        text=True,
        env=environment,
        cwd=home,
        check=False,
    )
    assert (done.returncode, done.stdout) == (5, "half an answer")
    assert "ggml.c:7: impossible" in done.stderr and "/somewhere" not in done.stderr
