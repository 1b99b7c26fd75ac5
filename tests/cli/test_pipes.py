"""Commands in pipes and scripts, with a real model: answers on stdout and nothing else."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest
from cli_harness import COMMAND, RunCli
from harness import require_runtime
from tiny_models import build

QUICK = ("--temp", 0, "--kv-budget", 512, "-n", 8)


def test_only_the_answer_is_on_stdout_and_nothing_has_colour(cli: RunCli, model: Path) -> None:
    done = cli("run", "-m", model, *QUICK, "-p", "What is a fox?")
    assert done.returncode == 0
    assert done.stdout.strip() and done.stdout.endswith("\n") and "\x1b" not in done.stdout
    assert done.stderr == "the answer was cut at 8 tokens; -n N allows more\n"


def test_stdin_goes_before_the_file_and_the_file_before_the_prompt(
    cli: RunCli, model: Path, home: Path
) -> None:
    (home / "file.txt").write_text("from the file\n")
    done = cli(
        "run", "-m", model, *QUICK, "--raw", "-f", "file.txt", "from the prompt", stdin="from stdin\n", n=""
    )
    whole = cli("run", "-m", model, *QUICK, "--raw", stdin="from stdin\n\nfrom the file\n\nfrom the prompt")
    assert done.returncode == 0
    assert done.stdout == whole.stdout


def test_a_dash_is_stdin(cli: RunCli, model: Path) -> None:
    whole = cli("run", "-m", model, *QUICK, "-p", "What is a fox?")
    for arguments in (("-",), ("-f", "-")):
        assert cli("run", "-m", model, *QUICK, *arguments, stdin="What is a fox?").stdout == whole.stdout


def test_json_says_what_it_took(cli: RunCli, model: Path) -> None:
    done = cli("run", "-m", model, *QUICK, "--json", "-p", "What is a fox?")
    plain = cli("run", "-m", model, *QUICK, "-p", "What is a fox?")
    result = json.loads(done.stdout)
    assert result["text"] == plain.stdout.strip()
    assert result["finish_reason"] == "length"
    assert result["usage"]["completion_tokens"] == 8
    assert result["kv"]["budget"] == 512 and result["kv"]["evicted"] == 0
    assert result["kv"]["n_past"] == result["usage"]["total_tokens"] - 1  # the last token is not read


def test_a_flag_beats_the_environment(cli: RunCli, model: Path) -> None:
    variables = {"LLAMA_ARG_MODEL": str(model), "H2O_GGUF_KV_BUDGET": "300", "LLAMA_ARG_N_PREDICT": "2"}
    by_variable = json.loads(cli("run", "--json", "-p", "Hi", **variables).stdout)
    assert (by_variable["kv"]["budget"], by_variable["usage"]["completion_tokens"]) == (300, 2)
    by_flag = json.loads(cli("run", "--json", "-p", "Hi", "--kv-budget", 400, **variables).stdout)
    assert by_flag["kv"]["budget"] == 400


def test_a_budget_of_the_environment_gives_way_to_policy_none(cli: RunCli, model: Path) -> None:
    arguments = ("run", "-m", model, "--json", "-n", 1, "-p", "Hi", "--policy", "none", "-c", 512)
    done = cli(*arguments, H2O_GGUF_KV_BUDGET="300")
    assert done.returncode == 0
    assert json.loads(done.stdout)["kv"]["policy"] == "none"
    assert "H2O_GGUF_KV_BUDGET is 300" in done.stderr
    assert cli(*arguments, "--kv-budget", 300).returncode == 2


@pytest.mark.parametrize("flag", ["--kv-budget", "--kv-evict-sink", "--kv-evict-window"])
def test_a_policy_none_of_the_environment_gives_way_to_a_flag_that_evicts(
    cli: RunCli, model: Path, flag: str
) -> None:
    arguments = ("run", "-m", model, "--json", "-n", 1, "-p", "Hi", "-c", 1024)
    done = cli(*arguments, flag, 300, H2O_GGUF_POLICY="none")
    assert done.returncode == 0
    kv = json.loads(done.stdout)["kv"]
    assert kv["policy"] == "h2o+" and (flag != "--kv-budget" or kv["budget"] == 300)
    assert f"$H2O_GGUF_POLICY is none, which does not count with {flag}: the policy is h2o+" in done.stderr
    both = cli(*arguments, H2O_GGUF_POLICY="none", H2O_GGUF_KV_BUDGET="300")
    assert json.loads(both.stdout)["kv"]["policy"] == "none"
    assert "H2O_GGUF_KV_BUDGET is 300" in both.stderr
    assert cli(*arguments, flag, 300, "--policy", "none", H2O_GGUF_POLICY="h2o").returncode == 2


def test_what_was_evicted_is_said_on_stderr(cli: RunCli, model: Path, home: Path) -> None:
    (home / "long.txt").write_text("The fox went to the sea and came back.\n" * 40)
    done = cli("summarize", "long.txt", "-m", model, "--kv-budget", 256, "-n", 8, "-ub", 64)
    assert done.returncode == 0
    assert done.stdout.strip()
    assert "evicted by h2o+" in done.stderr and "budget 256" in done.stderr
    result = json.loads(
        cli("summarize", "-", "-m", model, "--kv-budget", 256, "-n", 4, "--json",
            stdin=(home / "long.txt").read_bytes()).stdout
    )  # fmt: skip
    assert result["usage"]["document_tokens"] == pytest.approx(40 * 10, rel=0.1)
    assert result["kv"]["used"] <= 256
    assert result["kv"]["evicted"] == result["kv"]["n_past"] - result["kv"]["used"]


def test_a_full_cache_under_policy_none_ends_with_4_and_the_answer_so_far(cli: RunCli, home: Path) -> None:
    require_runtime()
    build("llama", home / "tiny.gguf")
    arguments = ("-m", "tiny.gguf", "--policy", "none", "-c", 40, "-n", 100, "--temp", 0)
    done = cli("run", *arguments, "--raw", "-p", "Hi")
    assert done.returncode == 4 and done.stdout.strip()
    assert "the context of 40 tokens is full" in done.stderr
    assert "--ctx-size" in done.stderr and "--policy h2o+" in done.stderr
    assert (
        json.loads(cli("run", *arguments, "--raw", "--json", "-p", "Hi").stdout)["finish_reason"] == "length"
    )


def test_an_answer_without_a_limit_ends_at_the_context_of_the_training(cli: RunCli, home: Path) -> None:
    require_runtime()
    build("llama", home / "tiny.gguf", n_ctx_train=40)
    done = cli("run", "-m", "tiny.gguf", "--kv-budget", 16, "--raw", "-n", -1, "--temp", 0, "-p", "Hi")
    assert done.returncode == 0
    assert "the answer was cut at 40 tokens; -n N allows more" in done.stderr


def test_a_prompt_that_does_not_fit_is_refused_with_4_and_the_numbers(cli: RunCli, model: Path) -> None:
    done = cli("run", "-m", model, "--policy", "none", "-c", 256, "-p", "word " * 300)
    assert (done.returncode, done.stdout) == (4, "")
    assert "256" in done.stderr and "--ctx-size" in done.stderr


@pytest.mark.parametrize("arguments", [("-fa", "off", "-ctv", "q8_0"), ("--policy", "h3o"), ("-fa", "maybe")])
def test_illegal_options_are_usage_errors(cli: RunCli, model: Path, arguments: tuple[str, ...]) -> None:
    done = cli("run", "-m", model, "-p", "hi", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")


def test_a_closed_pipe_is_quiet(environment: dict[str, str], model: Path, home: Path) -> None:
    command = [*COMMAND, "run", "-m", str(model), "-p", "Count.", "-n", "60", "--kv-budget", "512"]
    with subprocess.Popen(
        command, env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_an_interrupted_run_leaves_with_130_and_its_partial_answer(
    environment: dict[str, str], model: Path, home: Path
) -> None:
    command = [
        *COMMAND,
        "run",
        "-m",
        str(model),
        "-p",
        "Tell a long story.",
        "-n",
        "500",
        "--kv-budget",
        "512",
    ]
    with subprocess.Popen(
        command, env=environment, cwd=home, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        first = process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait() == 130
    assert len(first) == 4 and rest.endswith(b"\n")


def test_a_piped_chat_takes_a_message_a_line_and_marks_nothing(cli: RunCli, model: Path) -> None:
    script = 'Hi!\n\n/nope\n"""two\nlines"""\n/kv\n'
    done = cli("chat", "-m", model, *QUICK, stdin=script)
    assert done.returncode == 0
    assert ">" not in done.stdout and "\x1b" not in done.stdout + done.stderr
    assert "unknown command /nope" in done.stderr
    assert "conversation: 4 messages" in done.stderr


@pytest.mark.slow
def test_a_chat_of_60_turns_stays_in_a_budget_of_256(cli: RunCli, model: Path) -> None:
    turns = "".join(f"Tell me something about the number {i}.\n" for i in range(60))
    done = cli("chat", "-m", model, "-sys", "You are a kind assistant named Bo.", "--kv-budget", 256,
               "-n", 24, "--seed", 1, stdin=turns + "/kv\n")  # fmt: skip
    assert done.returncode == 0
    assert "conversation: 121 messages" in done.stderr
    assert "256 of 256 entries" in done.stderr
    assert done.stderr.count("the cache is full") == 1


def test_inspect_reads_the_header_and_weighs_the_cache(cli: RunCli, model: Path) -> None:
    facts = json.loads(cli("inspect", model, "--json", "--kv-budget", 1024).stdout)
    assert facts["can_evict"] and facts["n_layer"] == 30 and set(facts["n_head_kv"]) == {3}
    # 30 layers, K and V, 3 heads of 64 in f16; 1,024 entries and a ubatch of 512; context 8,192
    assert facts["kv"]["budget_bytes"] == 30 * 2 * 3 * 64 * 2 * (1024 + 512)
    assert facts["kv"]["full_bytes"] == 30 * 2 * 3 * 64 * 2 * 8192
    text = cli("inspect", model)
    assert "evict        yes" in text.stdout and text.stderr == ""
    running = json.loads(cli("run", "-m", model, "--json", "-n", 1, "-p", "Hi", "--kv-budget", 1024).stdout)
    assert running["kv"]["bytes"] == facts["kv"]["budget_bytes"]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gemma2", "phi3"])
def test_inspect_weighs_what_the_runtime_allocates(cli: RunCli, home: Path, architecture: str) -> None:
    require_runtime()
    build(architecture, home / "tiny.gguf")
    sizes = ("--kv-budget", 100, "-ub", 32, "--json")
    facts = json.loads(cli("inspect", "tiny.gguf", *sizes).stdout)
    done = cli("run", "-m", "tiny.gguf", *sizes, "--raw", "-n", 2, "-p", "Hi")
    assert json.loads(done.stdout)["kv"]["bytes"] == facts["kv"]["budget_bytes"], done.stderr


def test_a_model_without_a_kv_cache_is_explained_and_refused(cli: RunCli, home: Path) -> None:
    require_runtime()
    build("mamba", home / "tiny.gguf")
    assert "evict        no: it has no KV cache" in cli("inspect", "tiny.gguf").stdout
    done = cli("run", "-m", "tiny.gguf", "--kv-budget", 64, "-p", "Hi")
    assert (done.returncode, done.stdout) == (3, "")
    assert "no KV cache" in done.stderr
    assert cli("run", "-m", "tiny.gguf", "--policy", "none", "--raw", "-n", 2, "-p", "Hi").returncode == 0


def test_models_list_as_json_marks_the_default(cli: RunCli) -> None:
    models = json.loads(cli("models", "list", "--json").stdout)
    assert [m["name"] for m in models if m["is_default"]] == ["smollm2-135m"]
    assert not any(m["is_installed"] for m in models)
    assert all(len(m["sha256"]) == 64 for m in models)


def test_models_that_are_here_are_found_listed_and_removed(cli: RunCli, model: Path, home: Path) -> None:
    (home / "models").mkdir()
    link = home / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    link.symlink_to(model)
    assert cli("models", "path").stdout == f"{link}\n"
    assert "smollm2-135m        here" in cli("models", "list").stdout
    assert cli("run", "-p", "Hi", "-n", 1, "--kv-budget", 512).returncode == 0
    assert "removed" in cli("models", "remove", "smollm2-135m").stderr
    assert not link.exists() and model.exists()
