"""Flags, environment variables and help, without a model."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from h2o_gguf import __version__
from h2o_gguf.cli import bench, calibrating, chat, compare, eval, run, summarize
from h2o_gguf.cli.app import app
from h2o_gguf.cli.flags import expand_flags
from h2o_gguf.cli.options import CacheFlags
from h2o_gguf.policies import registry

runner = CliRunner()
COMMANDS = (
    "chat",
    "run",
    "summarize",
    "inspect",
    "bench",
    "eval",
    "compare",
    "calibrate",
    "models list",
    "models fetch",
    "models remove",
    "models path",
)
MODEL_COMMANDS = ("chat", "run", "summarize")
# Letters, names and variables that people know from llama.cpp.
FLAGS = {
    "model": ("-m", "--model", "LLAMA_ARG_MODEL"),
    "ctx_size": ("-c", "--ctx-size", "LLAMA_ARG_CTX_SIZE"),
    "batch_size": ("-b", "--batch-size", "LLAMA_ARG_BATCH"),
    "ubatch_size": ("-ub", "--ubatch-size", "LLAMA_ARG_UBATCH"),
    "threads": ("-t", "--threads", "LLAMA_ARG_THREADS"),
    "gpu_layers": ("-ngl", "--gpu-layers", "LLAMA_ARG_N_GPU_LAYERS"),
    "flash_attn": ("-fa", "--flash-attn", "LLAMA_ARG_FLASH_ATTN"),
    "cache_type_k": ("-ctk", "--cache-type-k", "LLAMA_ARG_CACHE_TYPE_K"),
    "cache_type_v": ("-ctv", "--cache-type-v", "LLAMA_ARG_CACHE_TYPE_V"),
    "predict": ("-n", "--predict", "LLAMA_ARG_N_PREDICT"),
    "seed": ("-s", "--seed", "LLAMA_ARG_SEED"),
    "temp": ("--temp", "--temperature", "LLAMA_ARG_TEMPERATURE"),
    "top_k": ("--top-k", "--top-k", "LLAMA_ARG_TOP_K"),
    "top_p": ("--top-p", "--top-p", "LLAMA_ARG_TOP_P"),
    "min_p": ("--min-p", "--min-p", "LLAMA_ARG_MIN_P"),
    "kv_budget": ("--kv-budget", "--max-kv-size", "H2O_GGUF_KV_BUDGET"),
    "policy": ("--policy", "--policy", "H2O_GGUF_POLICY"),
    "sink": ("--kv-evict-sink", "--kv-evict-sink", None),
    "window": ("--kv-evict-window", "--kv-evict-window", None),
    "attic": ("--attic", "--attic", "H2O_GGUF_ATTIC"),
    "attic_limit": ("--attic-limit", "--attic-limit", "H2O_GGUF_ATTIC_LIMIT"),
    "attic_type": ("--attic-type", "--attic-type", "H2O_GGUF_ATTIC_TYPE"),
    "recall_every": ("--recall-every", "--recall-every", "H2O_GGUF_RECALL_EVERY"),
    "verbose": ("-v", "--verbose", None),
}


def parameters(command: Any) -> dict[str, Any]:
    """The options of a command by parameter name."""
    found = {}
    for name, parameter in inspect.signature(command).parameters.items():
        for note in getattr(parameter.annotation, "__metadata__", ()):
            found[name] = note
    return found


def test_the_help_of_policy_names_every_policy_of_ours() -> None:
    flag = get_type_hints(CacheFlags, include_extras=True)["policy"].__metadata__[0]
    assert set(registry.OURS) <= set(re.split("[ ,()]+", flag.help))


def names_of(option: Any) -> tuple[str, ...]:
    first = () if option.default is ... else (option.default,)
    return tuple(name for name in (*first, *(option.param_decls or ())) if isinstance(name, str))


@pytest.mark.parametrize("command", [chat.chat, run.run, summarize.summarize])
@pytest.mark.parametrize("name", FLAGS)
def test_flags_have_llama_cpps_letters_names_and_variables(command: Any, name: str) -> None:
    short, long, variable = FLAGS[name]
    option = parameters(command)[name]
    assert {short, long} <= set(names_of(option))
    assert option.envvar == variable


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_of_the_command(command: str) -> None:
    result = runner.invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    functions = {
        "chat": chat.chat, "run": run.run, "summarize": summarize.summarize, "bench": bench.bench,
        "eval": eval.evaluate, "compare": compare.compare,
        "calibrate": calibrating.calibrate,
    }  # fmt: skip
    function = functions.get(command)
    for option in parameters(function).values() if function else ():
        for name in names_of(option):
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", result.stdout), name
        if option.envvar:
            assert option.envvar in result.stdout
    shown = set(re.findall(r"^ +(?:-\w+, )?(--[\w-]+)", result.stdout, re.M))
    assert "--help" in shown


def test_help_of_the_whole_lists_the_commands() -> None:
    result = runner.invoke(app, ["--help"])
    names = ("chat", "run", "summarize", "inspect", "bench", "eval", "compare", "models")
    assert all(name in result.stdout for name in names)


def test_version_is_the_packages() -> None:
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"h2o-gguf {__version__}\n")


def test_without_a_command_the_help_is_shown() -> None:
    assert "Usage" in runner.invoke(app, []).output


@dataclass(frozen=True)
class Group:
    size: Annotated[int, typer.Option("--size", "-s", envvar="TEST_SIZE")] = 1
    word: Annotated[str, typer.Option("--word")] = "a"


@pytest.mark.parametrize(
    ("arguments", "variable", "expected"),
    [([], None, 2), ([], "3", 3), (["-s", "4"], "3", 4), (["--size", "4"], None, 4)],
)
def test_a_flag_beats_the_environment_which_beats_the_default(
    arguments: list[str], variable: str | None, expected: int
) -> None:
    seen: list[Group] = []

    def command(group: Group) -> None:
        seen.append(group)

    command.__annotations__ = {"group": Group, "return": None}
    small = typer.Typer()
    small.command()(expand_flags(size=2)(command))
    env = {} if variable is None else {"TEST_SIZE": variable}
    assert runner.invoke(small, arguments, env=env).exit_code == 0
    assert seen == [Group(expected, "a")]
