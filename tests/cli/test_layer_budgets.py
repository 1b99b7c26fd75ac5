"""`h2o-gguf calibrate`, and --layer-budgets where it is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_harness import RunCli, assert_refused

from h2o_gguf.cli.render import kv_lines, layer_classes
from h2o_gguf.report import KVReport


def test_classes_of_layers_are_said_largest_first() -> None:
    assert layer_classes([64, 1200, 64, 300]) == "1,200 in 1 layer, 300 in 1 layer, 64 in 2 layers"


def test_the_cache_of_a_chat_names_its_budgets_by_layer() -> None:
    kv = KVReport("pyramidkv", 60, 30, 0, 30, 4096, layer_budgets=(80, 80, 20))
    assert kv_lines(kv)[1] == "layers   80 in 2 layers, 20 in 1 layer"
    assert not any("in 2 layers" in line for line in kv_lines(KVReport("h2o+", 60, 30, 0, 30, 4096)))


def test_a_calibration_is_written_and_read_by_other_commands(cli: RunCli, model: Path, home: Path) -> None:
    text = home / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    options = ("--length", "520", "--kv-budget", "64", "--out", home / "c.json")
    done = cli("calibrate", model, "-f", text, *options)
    assert done.returncode == 0, done.stderr
    said = [int(words.split()[2]) for words in done.stdout.split(",")]
    assert sum(said) == 30, "layers"
    assert "--layer-budgets" in done.stderr
    weighed = cli(
        "inspect", model, "--kv-budget", "64", "--layer-budgets", home / "c.json", "--json"
    )  # fmt: skip
    kv = json.loads(weighed.stdout)["kv"]
    assert 63 < sum(kv["layer_budgets"]) / 30 <= 64
    done = cli(
        "run", "-m", model, "-p", "Say yes.", "-n", "2", "--json", "--kv-budget", "128",
        "--layer-budgets", home / "c.json",
    )  # fmt: skip
    assert len(json.loads(done.stdout)["kv"]["layer_budgets"]) == 30


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "-m", "MODEL", "-p", "x", "--layer-budgets", "pyramid:0"), "how steep"),
        (("run", "-m", "MODEL", "-p", "x", "--layer-budgets", "pyramid"), "give --kv-budget too"),
        (("run", "-m", "MODEL", "-p", "x", "--layer-budgets", "9,9"), "2 budgets for 30 layers"),
        (("run", "-m", "MODEL", "-p", "x", "--layer-budgets", "no.json"), "cannot read 'no.json'"),
        (("eval", "MODEL", "--layer-budgets", "9,9"), "shares of a length"),
        (("eval", "MODEL", "--layer-budgets", "pyramid", "--mode", "one-shot"), "mode bounded"),
        (("calibrate", "MODEL", "--length", "100", "--out", "c.json"), "513 to"),
        (("calibrate", "MODEL", "--policy", "none", "--out", "c.json"), "evicts nothing"),
    ],
)
def test_budgets_by_layer_that_cannot_be_are_usage_errors(
    cli: RunCli, model: Path, arguments: tuple[str, ...], words: str
) -> None:
    assert_refused(cli(*(model if word == "MODEL" else word for word in arguments)), 2, words)
