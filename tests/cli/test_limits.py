"""Numbers that are too large, on the command line and in the model's file."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_harness import RunCli, assert_refused
from harness import require_runtime
from tiny_models import build

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
