"""`h2o-gguf eval` and `compare` from end to end, at sizes that are too small to tell anything."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from cli_harness import COMMAND, RunCli, assert_refused
from harness import require_runtime

QUICK = ("--length", 256, "-n", 1, "--task", "single-noise", "--kept", 0.25, "--cache", "results", "-b", 64)


@pytest.fixture(autouse=True)
def _runtime() -> None:
    require_runtime()


def test_a_run_says_what_it_measured_and_a_second_measures_nothing(
    cli: RunCli, model: Path, home: Path
) -> None:
    done = cli("eval", model, *QUICK, "--task", "fidelity", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    names = ["none", "h2o+", "streaming", "random like h2o+"]
    assert [(r["cache"], r["budget"], r["is_new"]) for r in data["results"]] == [
        (name, 256 if name == "none" else 64, True) for name in names
    ]
    assert [each["cache"] for each in data["fidelity"]] == names
    assert [r["n_kept"] for r in data["results"]] == [data["results"][0]["n_context"], 64, 64, 64]
    assert all(r["peak_bytes"] >= r["kept_bytes"] > 0 for r in data["results"])
    assert len(data["environment"]["model_sha256"]) == 64 and data["recommendation"]["headline"]
    again = cli("eval", model, *QUICK, "--task", "fidelity", "--out", "new/page")
    assert again.returncode == 0 and again.stderr.count("wrote ") == 3
    later = json.loads((home / "new" / "page.json").read_text())
    assert not any(result["is_new"] for result in later["results"])
    assert later["rows"] == data["rows"] and later["fidelity"] == data["fidelity"]
    assert (home / "new" / "page.md").read_text() == again.stdout
    page = (home / "new" / "page.html").read_text()
    assert "<svg" in page and not re.search(r'(src|href)="(?!#)', page)


def test_ctrl_c_keeps_what_was_done(environment: dict[str, str], model: Path, home: Path) -> None:
    command = [*COMMAND, "eval", str(model), *map(str, QUICK), "--json"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment, cwd=home, **pipes)  # type: ignore[call-overload]
    try:
        end = time.monotonic() + 120
        while time.monotonic() < end and not _n_results(home / "results"):
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, b""), errors
    assert b"Traceback" not in errors
    assert 1 <= _n_results(home / "results") < 4
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, timeout=300, check=True)
    kept = [result["is_new"] for result in json.loads(done.stdout)["results"]]
    assert 1 <= kept.count(False) < 4


def _n_results(folder: Path) -> int:
    import sqlite3

    if not (folder / "cache.db").is_file():
        return 0
    try:
        with sqlite3.connect(f"file:{folder / 'cache.db'}?mode=ro", uri=True) as database:
            return int(database.execute("SELECT COUNT(*) FROM Cache").fetchone()[0])
    except sqlite3.OperationalError:
        return 0  # it is being made


def test_one_shot_and_compare_have_their_tables(cli: RunCli, model: Path) -> None:
    done = cli("eval", model, *QUICK, "--mode", "one-shot", "--question", "seen")
    assert done.returncode == 0, done.stderr
    assert "Answers, one-shot, question seen" in done.stdout and "## Recommendation" in done.stdout
    done = cli("compare", model, *QUICK, "--policy", "h2o+", "--cache-type", "q8_0", "--out", "cmp")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows == ["cache", "none", "none, q8_0", "streaming", "h2o+", "h2o+, q8_0", "random like h2o+"]


def test_an_attic_comes_beside_each_cache_that_evicts(cli: RunCli, model: Path, home: Path) -> None:
    done = cli(
        "eval", model, *QUICK, "--attic", "--recall-every", 32, "--task", "fidelity", "--policy", "streaming",
        "--out", "page",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    data = json.loads((home / "page.json").read_text())
    names = [
        "none", "streaming", "streaming with attic every 32", "random like h2o+",
        "random like h2o+ with attic every 32",
    ]  # fmt: skip
    assert [result["cache"] for result in data["results"]] == names
    assert [each["cache"] for each in data["fidelity"]] == names
    assert all(name in (home / "page.html").read_text() for name in names)
    plain, recalling = data["fidelity"][1:3]
    assert plain["perplexity"] != recalling["perplexity"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kept", "1.5"), ("kept", "1.5", "0.25")),
        (("--kept", "9999"), ("9999", "255")),
        (("--task", "nedles"), ("'nedles'",)),
        (("--policy", "h20"), ("'h20'", "h2o")),
        (("--mode", "both"), ("bounded or one-shot",)),
        (("--length", "90000"), ("90000", "8000")),
        (("--text", "missing.txt"), ("'missing.txt'", "no such file")),
        (("--text", "/dev/null"), ("'/dev/null'", "no text")),
        (("--recall-every", "64"), ("--recall-every is 64", "nothing to recall from")),
        (("--tolerance", "0"), ("tolerance",)),
        (("--batch-size", "100000"), ("100000", "8192")),
        (("--out", "/proc/none/page"), ("'/proc/none/page'", "--out")),
        (("--cache", "/dev/null"), ("'/dev/null'", "--cache off")),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    cli: RunCli, model: Path, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    assert_refused(cli("eval", model, *QUICK[:2], "--cache", "off", *arguments), 2, *words)
