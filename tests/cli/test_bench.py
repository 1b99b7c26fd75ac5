"""`h2o-gguf bench` from end to end, on a model that is too small to measure anything."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from cli_harness import RunCli
from harness import require_runtime
from tiny_models import build

from h2o_gguf.benchmark.process import WorkerProcess
from h2o_gguf.benchmark.variants import Settings, Variant, make_plan, variants
from h2o_gguf.cli import bench_files
from h2o_gguf.errors import OptionError
from h2o_gguf.models import read_shape

QUICK = ("--history", 96, "--kv-budget-share", 0.25, "--repeats", 2)


@pytest.fixture
def tiny(home: Path) -> str:
    require_runtime()
    build("llama", home / "tiny.gguf")
    return "tiny.gguf"


def test_json_has_a_row_for_each_way(cli: RunCli, tiny: str) -> None:
    done = cli("bench", tiny, *QUICK, "--scores-off", "--json", "-ctk", "q8_0", "-ctv", "q8_0")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    (section,) = data["sections"]
    assert [(row["variant"], row["budget"]) for row in section["rows"]] == [
        ("hooks off", None), ("ours, full", None), ("ours, 25 %", 24), ("ours, 25 %, no scores", 24)
    ]  # fmt: skip
    # with a budget in the middle between two evictions of 64
    assert [row["n_entries"] for row in section["rows"]] == [96, 96, 24 + 32, 24 + 32]
    assert section["scores_cost"]["decode"]["n"] == 2
    for row in section["rows"]:
        assert row["decode_rate"]["min"] > 0 and row["prefill_rate"]["min"] > 0 and row["rss_bytes"] > 2**20
        assert row["kv_bytes"] == 2 * 2 * 2 * 64 // 32 * 34 * 256
        assert (row["evict_s"] is None) == (row["budget"] is None)


@pytest.mark.parametrize(("architecture", "n_ctx"), [("gemma3", 256), ("jamba", 256), ("gpt2", 512)])
def test_other_caches_are_measured_too(cli: RunCli, home: Path, architecture: str, n_ctx: int) -> None:
    """Windows, states that cannot go back, positions that cannot be renumbered."""
    require_runtime()
    build(architecture, home / "m.gguf", n_ctx_train=n_ctx)
    done = cli("bench", "m.gguf", *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["sections"][0]["rows"]) == 3


def test_the_table_and_its_files(cli: RunCli, tiny: str, home: Path) -> None:
    done = cli("bench", tiny, *QUICK, "--out", "new/figures/speed.v1")
    assert done.returncode == 0, done.stderr
    folder = home / "new" / "figures"
    assert {path.name for path in folder.iterdir()} == {
        f"speed.v1.{end}" for end in ("json", "md", "png", "html")
    }
    assert done.stderr.count("wrote ") == 4
    assert (folder / "speed.v1.md").read_text() == done.stdout
    assert done.stdout.startswith("| history | cache") and '"hooks off" is this runtime' in done.stdout
    assert [line.count("|") for line in done.stdout.splitlines()[:5]] == [12] * 5  # head, line, three rows
    assert len(re.findall(r"^\| +96 \|", done.stdout, re.M)) == 3
    page = (folder / "speed.v1.html").read_text()
    assert "<svg" in page and "<td>ours, 25 % (24)</td>" in page
    assert not re.search(r'(src|href)="(?!#)', page)  # nothing is fetched
    assert (folder / "speed.v1.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--history", 300), ("300", "256", "250")),
        (("--history", 10), ("10", "64")),
        (("--kv-budget-share", 1.5), ("1.5",)),
        (
            ("--history", 96, "--kv-budget-share", 0.01),
            ("a share of 0.01 of 96 tokens", "budget of 1", "4 entries"),
        ),
        (("--threads", 513), ("--threads is 513", "512")),
        (("--out", "."), ("'.'", "names")),
        (("--out", "new/.."), ("'new/..'", "names")),
        (("--stock", "."), ("libllama", "hooks off")),
        (("-ctk", "q9_9"), ("q9_9", "q8_0")),
        (("--repeats", 0), ("--repeats",)),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    cli: RunCli, tiny: str, arguments: tuple[object, ...], words: tuple[str, ...]
) -> None:
    done = cli("bench", tiny, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_models_that_cannot_be_measured_are_refused(cli: RunCli, home: Path) -> None:
    require_runtime()
    build("mamba", home / "mamba.gguf")
    for name, word in (("mamba.gguf", "no KV cache"), ("missing.gguf", "no such file")):
        done = cli("bench", name)
        assert (done.returncode, done.stdout) == (3, "")
        assert word in done.stderr


def test_our_own_runtime_is_no_stock_one(cli: RunCli, tiny: str) -> None:
    from h2o_gguf.bindings import library_path

    done = cli("bench", tiny, *QUICK, "--stock", library_path().parent)
    assert (done.returncode, done.stdout) == (5, "")
    assert "'llama.cpp'" in done.stderr and "not an unmodified llama.cpp" in done.stderr


def test_without_matplotlib_the_command_that_helps_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_files, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'h2o-gguf\[plots\]'"):
        bench_files.require_out(Path("here"))


@pytest.mark.parametrize(("is_ours", "share"), [(False, None), (True, None), (True, 0.02)])
def test_a_filled_cache_is_as_full_as_one_that_was_read(
    home: Path, tiny: str, is_ours: bool, share: float | None
) -> None:
    path, n = str(home / tiny), 2500
    settings = Settings(repeats=1, n_threads=1)
    plan = make_plan(Variant("it", share, is_ours), n, path, read_shape(path), settings)
    with WorkerProcess("it", plan.job) as worker:
        worker.ask("read", 96)  # something that is forgotten
        worker.ask("reset")
        worker.ask("fill", n)
        if share is None:
            assert worker.ask("write", 3)["entries"] == n
            worker.ask("read", plan.n_cells - n)  # every cell but those of the n tokens is free
            with pytest.raises(Exception, match=f"llama_decode returned 1 at position {plan.n_cells}"):
                worker.ask("read", 1)
        else:
            worker.ask("settle")
            assert worker.ask("write", 1)["entries"] == 50


def test_memory_of_a_worker_is_its_own_and_its_errors_are_native(home: Path, tiny: str) -> None:
    path = str(home / tiny)
    shape, settings = read_shape(path), Settings(repeats=1, n_threads=1)
    (plan, *_) = [make_plan(v, 96, path, shape, settings) for v in variants(settings)]
    ballast = np.ones(300 << 20, np.uint8)  # of the parent
    with WorkerProcess("it", plan.job) as worker:
        assert 2**20 < worker.ask("facts")["rss"] < ballast.nbytes
        with pytest.raises(Exception, match=r"llama_decode returned 1 at position 256: \w+"):
            for _ in range(5):
                worker.ask("read", 64)
    (home / "broken.gguf").write_bytes((home / tiny).read_bytes()[:-1000])
    with pytest.raises(Exception, match=r"'it': cannot load the model: .*(bounds|corrupt)"):
        WorkerProcess("it", plan.job | {"model": os.fspath(home / "broken.gguf")})
