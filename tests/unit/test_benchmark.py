"""The comparison with llama.cpp: turns, statistics and failures, with workers that compute nothing."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import require_runtime
from rich.text import Text
from tiny_models import build

from h2o_gguf.benchmark import variants as benchmark_variants
from h2o_gguf.benchmark.comparison import Samples, compare, make_section, measure
from h2o_gguf.benchmark.process import WorkerProcess
from h2o_gguf.benchmark.results import Spread
from h2o_gguf.benchmark.variants import EVICTIONS, Plan, Settings, Variant, fitting_histories, variants
from h2o_gguf.cli import bench_table
from h2o_gguf.errors import (
    BudgetError,
    ModelFileError,
    NativeError,
    OptionError,
    OutOfMemoryError,
    UnsupportedModelError,
)
from h2o_gguf.models import ModelShape, read_shape

BLOCK, BUDGET = 64, 100


class FakeWorker:
    """Counts tokens, and notes what it is asked for in a log that all workers share."""

    def __init__(self, name: str, log: list[tuple[str, str, int]], version: str = "1") -> None:
        self.name, self.log = name, log
        self.n_past = 0
        self.facts = {"version": version, "system": "a CPU ", "rss": 7}

    def ask(self, verb: str, n: int = 0) -> dict[str, Any]:
        self.log.append((self.name, verb, self.n_past))
        if verb == "facts":
            return self.facts
        if verb == "write":
            return {"seconds": [9.0] + [1.0] * (n - 1), "entries": self.n_past}
        self.n_past = 0 if verb == "reset" else self.n_past + n
        return {"seconds": float(n)}

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append((self.name, "end", self.n_past))


class FakeBandwidth:
    def __init__(self, n_threads: int = 1) -> None:
        self.is_closed = False

    def __call__(self) -> float:
        return 1e9

    def close(self) -> None:
        self.is_closed = True


def plan(name: str, budget: int | None = None, *, is_scored: bool = True) -> Plan:
    share = None if budget is None else 0.5
    variant = Variant(name, share, is_ours=name != "a", is_scored=is_scored)
    return Plan(variant, budget, 0 if budget is None else BLOCK, 256, 32, 2**20, {})


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> ModelShape:
    return read_shape(build("llama", tmp_path_factory.mktemp("models") / "m.gguf"))


# Turns


def run(n: int, repeats: int) -> list[tuple[str, str, int]]:
    log: list[tuple[str, str, int]] = []
    plans = [plan("a"), plan("b"), plan("c", BUDGET)]
    workers = {p.variant.name: FakeWorker(p.variant.name, log) for p in plans}
    measure(n, plans, workers, repeats, FakeBandwidth())
    return log


def test_writing_goes_round_and_another_one_begins_each_time() -> None:
    log = run(1000, repeats=4)
    names = "".join(name for name, verb, n_past in log if verb == "write" and n_past >= 1000)
    assert [names[i : i + 3] for i in range(0, len(names), 3)] == ["abc", "bca", "cab", "abc"]


def test_reading_goes_round_in_rounds_of_512() -> None:
    log = run(1100, repeats=2)
    start = [verb for _, verb, _ in log].index("reset") + 3
    assert [(name, n_past) for name, _, n_past in log[start : start + 9]] == [
        ("a", 0), ("b", 0), ("c", 0),
        ("b", 512), ("c", 512), ("a", 512),
        ("c", 1024), ("a", 1024), ("b", 1024),
    ]  # fmt: skip


def test_tokens_are_timed_after_64_and_after_the_whole_history() -> None:
    written = {(name, n_past) for name, verb, n_past in run(1100, repeats=3) if verb == "write"}
    # a cache with a budget in the middle between two evictions
    middle = 1100 + BLOCK // 2
    assert written == {("a", 64), ("b", 64), ("c", 64), ("a", 1100), ("b", 1100), ("c", middle)}


def test_short_histories_are_read_again_and_only_budgets_evict() -> None:
    log = run(200, repeats=3)
    assert [name for name, verb, _ in log if verb == "reset"] == ["a", "b", "c"] * 3
    assert [name for name, verb, _ in run(2049, repeats=3) if verb == "reset"] == ["a", "b", "c"]
    assert {name for name, verb, _ in log if verb == "settle"} == {"c"}


def test_filled_caches_are_not_read_and_everything_else_is_the_same() -> None:
    log: list[tuple[str, str, int]] = []
    workers = {name: FakeWorker(name, log) for name in "ac"}
    plans = [plan("a"), plan("c", BUDGET)]
    every, rates = measure(700, plans, workers, 2, FakeBandwidth(), is_filled=True)
    assert [(name, verb) for name, verb, _ in log if verb in ("reset", "fill")] == [
        ("a", "reset"), ("a", "fill"), ("c", "reset"), ("c", "fill")
    ]  # fmt: skip
    assert [(s.rounds, s.n_entries) for s in every] == [([], 700), ([], 700 + BLOCK // 2)]
    assert len(rates) == len(every[0].tokens) == 2 and len(every[1].evictions) == EVICTIONS


def test_the_first_token_of_a_turn_is_not_counted() -> None:
    log: list[tuple[str, str, int]] = []
    (samples,), _ = measure(200, [plan("a")], {"a": FakeWorker("a", log)}, 2, FakeBandwidth())
    assert samples.tokens == [1.0, 1.0]


# Statistics


def samples_of(p: Plan, **values: Any) -> Samples:
    given = {"short": [1.0], "rounds": [[1.0]], "tokens": [2.0], "n_short": 64, "n_entries": 464}
    return Samples(p, **{**given, "facts": {"rss": 5}, **values})


def test_a_spread_has_the_quartiles() -> None:
    assert Spread.of([9, 1, 8, 2, 7, 3, 6, 4, 5]) == Spread(9, 1, 3, 5, 7, 9)


def test_ratios_are_of_the_same_repetition(shape: ModelShape) -> None:
    # The machine slows down fourfold, for both alike.
    first = samples_of(plan("a"), tokens=[2.0, 4.0, 8.0], rounds=[[1.0, 2.0], [2.0, 4.0], [6.0, 6.0]])
    ours = samples_of(plan("b"), tokens=[1.0, 2.0, 4.0], rounds=[[0.5, 0.25], [1.0, 0.5], [2.0, 1.0]])
    _, row = make_section(200, [first, ours], [1.0] * 3, shape, Settings()).rows
    assert row.decode_speedup == Spread(3, 2, 2, 2, 2, 2)
    assert row.prefill_speedup == Spread(3, 4, 4, 4, 4, 4)
    assert row.prefill_rate == Spread.of([200 / 0.75, 200 / 1.5, 200 / 3.0])
    assert row.first_token_s == Spread.of([0.75, 1.5, 3.0])
    assert row.prefill_s == (1.0, 0.5)


def test_writing_pays_its_share_of_evictions(shape: ModelShape) -> None:
    ours = samples_of(plan("b", BUDGET), short=[0.01], tokens=[0.01], evictions=[0.64, 0.64, 9.0])
    (row,) = make_section(200, [ours], [1.0], shape, Settings()).rows
    assert row.decode_rate.median == pytest.approx(1 / (0.01 + 0.64 / BLOCK))
    assert row.evict_s == 0.64


def test_the_attention_part_is_what_the_history_adds(shape: ModelShape) -> None:
    # 2 layers, K and V, 2 KV heads of 64 values of 2 bytes; 400 entries more in 0.5 and in 0.25 s
    n_bytes = 400 * 2 * 2 * 2 * 64 * 2
    ours = samples_of(plan("b"), short=[1.0, 1.0], tokens=[1.5, 1.25], rounds=[[1.0], [1.0]])
    (row,) = make_section(464, [ours], [n_bytes * 4, n_bytes * 5], shape, Settings()).rows
    assert row.attention_rate == Spread.of([n_bytes / 0.5, n_bytes / 0.25])
    assert row.bandwidth_share == Spread.of([0.5, 0.8])


def test_quantized_rows_weigh_less(shape: ModelShape) -> None:
    settings = Settings(type_k="q8_0", type_v="q8_0")  # 34 bytes for 32 values
    (row,) = make_section(464, [samples_of(plan("b"))], [1.0], shape, settings).rows
    assert row.attention_rate is not None
    assert row.attention_rate.median == pytest.approx(400 * 2 * 2 * 2 * 64 / 32 * 34)


@pytest.mark.parametrize("values", [{"tokens": [1.05]}, {"tokens": [0.9]}, {"n_entries": 164}])
def test_attention_that_is_lost_in_noise_has_no_rate(shape: ModelShape, values: dict[str, Any]) -> None:
    (row,) = make_section(200, [samples_of(plan("b"), **values)], [1.0], shape, Settings()).rows
    assert row.attention_rate is None and row.bandwidth_share is None


def test_scores_are_compared_with_the_same_cells_without(shape: ModelShape) -> None:
    every = [
        samples_of(plan("a"), tokens=[9.0, 9.0], rounds=[[9.0]]),
        samples_of(plan("b"), tokens=[9.0, 9.0], rounds=[[9.0]]),
        samples_of(plan("c", BUDGET), tokens=[3.0, 2.0], rounds=[[5.0]]),
        samples_of(plan("d", BUDGET, is_scored=False), tokens=[2.0, 1.0], rounds=[[4.0]]),
    ]
    cost = make_section(200, every, [1.0, 1.0], shape, Settings()).scores_cost
    assert cost is not None
    assert cost.decode == Spread.of([1.5, 2.0]) and cost.prefill == Spread.of([1.25])
    assert make_section(200, every[:3], [1.0, 1.0], shape, Settings()).scores_cost is None


# What is compared


def test_the_scale_comes_first_and_scores_go_last(tmp_path: Path) -> None:
    assert [v.name for v in variants(Settings())] == ["hooks off", "ours, full", "ours, 20 %", "ours, 10 %"]
    last = variants(Settings(scores_off=True))[-1]
    assert last == Variant("ours, 20 %, no scores", 0.2, is_scored=False)
    assert variants(Settings(shares=(), scores_off=True))[-1].share is None


def test_shares_that_are_written_alike_are_one() -> None:
    names = [v.name for v in variants(Settings(shares=(0.2, 0.1, 0.2, 0.1000000001)))]
    assert names == ["hooks off", "ours, full", "ours, 20 %", "ours, 10 %"]


def test_histories_go_as_far_as_the_context(shape: ModelShape) -> None:
    assert shape.n_ctx_train == 256
    assert fitting_histories(Settings(), shape) == (200,)
    assert fitting_histories(Settings(histories=(100, 250)), shape) == (100, 250)
    with pytest.raises(OptionError, match=r"251 .* 256: the longest is 250"):
        fitting_histories(Settings(histories=(100, 251)), shape)


def test_positions_that_cannot_be_renumbered_leave_room_for_evictions(tmp_path: Path) -> None:
    learned = read_shape(build("gpt2", tmp_path / "m.gguf", n_ctx_train=1024))
    # a burst of 6, three evictions of 64 and the way to the middle before them
    assert fitting_histories(Settings(), learned) == (200,)
    with pytest.raises(OptionError, match=f"the longest is {1024 - 6 - 4 * 64}"):
        fitting_histories(Settings(histories=(800,)), learned)


@pytest.mark.parametrize(
    "options",
    [
        {"shares": (1.0,)},
        {"shares": (0.0,)},
        {"histories": (64,)},
        {"repeats": 0},
        {"type_v": "q9"},
        {"n_threads": 513},  # ggml ends the process
        {"n_ubatch": 0},
        {"stock": Path("nowhere")},
    ],
)
def test_settings_that_measure_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Settings(**options)


# The whole


def compare_fakes(path: Path, settings: Settings, **versions: str) -> tuple[Any, list[tuple[str, str, int]]]:
    require_runtime()
    log: list[tuple[str, str, int]] = []
    report = compare(
        str(path),
        settings,
        start=lambda name, job: FakeWorker(name, log, versions.get(name.split(",")[0], "1")),
        bandwidth=FakeBandwidth,  # type: ignore[arg-type]
    )
    return report, log


def test_the_report_is_json_and_names_no_folder(tmp_path: Path) -> None:
    settings = Settings(histories=(96, 200), repeats=2, n_threads=1, shares=(0.5,))
    report, log = compare_fakes(build("llama", tmp_path / "m.gguf"), settings)
    data = json.loads(json.dumps(report.as_dict()))
    assert str(tmp_path) not in json.dumps(data)
    assert set(data) == {"environment", "settings", "systems", "sections"}
    assert data["settings"]["histories"] == [96, 200] and data["settings"]["stock"] is False
    assert data["systems"]["ours, full"] == "a CPU"
    assert [section["history"] for section in data["sections"]] == [96, 200]
    for section in data["sections"]:
        assert section["read_bandwidth"]["median"] == 1e9
        assert [row["variant"] for row in section["rows"]] == ["hooks off", "ours, full", "ours, 50 %"]
        assert section["rows"][2]["budget"] == section["history"] // 2
        assert section["rows"][0]["decode_rate"]["median"] == 1.0 and section["rows"][0]["rss_bytes"] == 7
    # 2 layers, K and V, 2 KV heads of 64, f16; cells come in 256
    assert {row["kv_bytes"] for s in data["sections"] for row in s["rows"]} == {2 * 2 * 2 * 64 * 2 * 256}
    assert sum(verb == "end" for _, verb, _ in log) == 2 * 3


def test_a_terminal_of_100_columns_breaks_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(histories=(200,), repeats=2, n_threads=1)
    report, _ = compare_fakes(build("llama", tmp_path / "m.gguf"), settings)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "94")  # what the fakes take is 6 characters shorter than real memory
    monkeypatch.setenv("TERM", "xterm")
    bench_table.show(report)
    lines = Text.from_ansi(capsys.readouterr().out).plain.splitlines()
    words = {word for line in lines for word in line.split()}
    assert {word for title in bench_table.HEAD for word in title.split()} <= words
    assert any("ours, 20 % (40)" in line for line in lines)


def test_progress_ends_at_its_total(tmp_path: Path) -> None:
    require_runtime()
    seen: list[tuple[int, int]] = []
    compare(
        str(build("llama", tmp_path / "m.gguf")),
        Settings(repeats=2, scores_off=True),
        progress=lambda *done: seen.append(done),
        start=lambda name, job: FakeWorker(name, []),
        bandwidth=FakeBandwidth,  # type: ignore[arg-type]
    )
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_another_version_is_no_scale(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"ggml 2, here 1"):
        compare_fakes(build("llama", tmp_path / "m.gguf"), Settings(repeats=1), **{"hooks off": "2"})


@pytest.mark.parametrize(
    ("architecture", "settings", "error"),
    [
        ("mamba", Settings(), UnsupportedModelError),
        ("llama", Settings(n_ubatch=250), BudgetError),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is(
    tmp_path: Path, architecture: str, settings: Settings, error: type[Exception]
) -> None:
    with pytest.raises(error):
        compare_fakes(build(architecture, tmp_path / "m.gguf"), settings)
    with pytest.raises(ModelFileError):
        compare_fakes(tmp_path / "missing.gguf", settings)


def test_caches_that_do_not_fit_beside_each_other_are_refused_before_anything_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Three caches of 256 cells: 2 layers, K and V, 2 KV heads of 64, f16
    n_bytes = 3 * 2 * 2 * 2 * 64 * 2 * 256
    settings = Settings(histories=(96,), repeats=1, shares=(0.5,))
    path = build("llama", tmp_path / "m.gguf")
    monkeypatch.setattr(benchmark_variants, "available_bytes", lambda: n_bytes)
    compare_fakes(path, settings)
    monkeypatch.setattr(benchmark_variants, "available_bytes", lambda: n_bytes - 1)
    with pytest.raises(OutOfMemoryError, match=f"{n_bytes:,} bytes and {n_bytes - 1:,} are") as caught:
        compare_fakes(path, settings)
    assert (caught.value.n_bytes, caught.value.n_available) == (n_bytes, n_bytes - 1)


# Processes


def worker(code: str) -> WorkerProcess:
    return WorkerProcess("the fake", {}, (sys.executable, "-c", f"import os, sys\n{code}"))


ANSWER = "sys.stdin.readline(); print('{}', flush=True)\n"


def test_a_worker_that_dies_is_named_with_its_last_words() -> None:
    with pytest.raises(NativeError, match=r"'the fake'.* exit code 3: second line") as caught:
        worker("sys.stdin.readline(); print('first\\nsecond line', file=sys.stderr); sys.exit(3)")
    assert caught.value.code == 3


def test_a_worker_that_is_killed_is_named_with_the_signal() -> None:
    with worker(f"{ANSWER}sys.stdin.readline(); os.kill(os.getpid(), {int(signal.SIGKILL)})") as process:
        with pytest.raises(NativeError, match=r"'the fake'.* SIGKILL .*memory"):
            process.ask("read", 1)
        with pytest.raises(NativeError, match="SIGKILL"):
            process.ask("read", 1)


def test_what_a_worker_cannot_do_is_an_error_and_it_lives_on() -> None:
    code = f'{ANSWER}sys.stdin.readline(); print(\'{{"error": "no room"}}\', flush=True)\n{ANSWER}'
    with worker(code) as process:
        with pytest.raises(NativeError, match=r"'the fake': no room"):
            process.ask("read", 1)
        assert process.ask("read", 1) == {}


def test_a_busy_worker_ends_with_its_parent() -> None:
    with worker(f"{ANSWER}import time; time.sleep(600)") as process:
        pass
    assert process._process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("before", [None, "elsewhere"])
def test_another_library_finds_those_beside_it(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    searched = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
    monkeypatch.delenv(searched, raising=False)
    if before is not None:
        monkeypatch.setenv(searched, before)
    code = (
        f"import json, os; input(); print(json.dumps({{'path': os.environ.get('{searched}')}}), flush=True)"
    )
    for library, path in (("/stock", ":".join(filter(None, ["/stock", before]))), (None, before)):
        with WorkerProcess("it", {"library": library}, (sys.executable, "-c", code)) as process:
            assert process.facts["path"] == path
