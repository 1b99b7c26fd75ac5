"""The recommendation on results that are made up, and the page that carries it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from h2o_gguf.cli.eval_files import write_files
from h2o_gguf.cli.eval_table import write_markdown
from h2o_gguf.evaluation.cells import Cell, Outcome
from h2o_gguf.evaluation.evaluation import Report
from h2o_gguf.evaluation.recommendation import recommend
from h2o_gguf.evaluation.runner import Result
from h2o_gguf.evaluation.side_by_side import Reading
from h2o_gguf.evaluation.statistics import Interval
from h2o_gguf.evaluation.summary import floors, summarize
from h2o_gguf.evaluation.variants import FULL, Variant

RANDOM = Variant("random", like="h2o+")


def results(policy: str | Variant, kept: float, scores: list[float], task: str = "a") -> list[Result]:
    variant = Variant(policy) if isinstance(policy, str) else policy
    budget = round(1000 * kept)
    cell = Cell(variant, budget, kept, "bounded", "hidden", 1000, task, 0, 0, 128)
    outcome = Outcome(0.0, "", 900, 90, 10, budget, 1000 * budget, 2000 * budget, 9.0, 0.9, 2.0)
    return [
        Result(replace(cell, index=i), replace(outcome, score=score), True) for i, score in enumerate(scores)
    ]


def fidelity(policy: str, kept: float, low: float, high: float) -> Reading:
    budget = round(1000 * kept)
    ratio = Interval((low + high) / 2, low, high, 500)
    return Reading(
        Variant(policy), kept, budget, 1000, 500, 20.0, ratio, (3.0,) * 4, 0.01, 0.9, budget, 1000 * budget,
        2000 * budget, 90.0, 30.0,
    )  # fmt: skip


def test_the_smallest_budget_without_a_loss_is_chosen_and_its_doubts_are_named() -> None:
    measured = [
        *results(FULL, 1.0, [1.0] * 10),
        *results("h2o+", 0.5, [1.0] * 10), *results("h2o+", 0.25, [1.0] * 10),
        *results("h2o+", 0.1, [0.9] * 10), *results("streaming", 0.25, [0.5] * 10),
        *results(RANDOM, 0.1, [1.0] * 10),
    ]  # fmt: skip
    advice = recommend(measured, [], 0.01)
    assert advice.choice is not None and advice.choice.variant == Variant("h2o+")
    assert (advice.choice.kept, advice.choice.budget) == (0.25, 250)  # random is never chosen
    assert not advice.is_proven and "not proven" in advice.headline
    text = " ".join(advice.reasons)
    assert "10 samples without" in text and "hide one of 26%" in text and "takes 299" in text
    assert "streaming lost: 50.0 (50.0 to 50.0) points" in text
    assert "do not show what the policy is worth" not in text


def test_one_sample_is_not_samples() -> None:
    advice = recommend([*results(FULL, 1.0, [1.0]), *results("h2o+", 0.25, [1.0])], [], 0.01)
    text = " ".join(advice.reasons)
    assert "over 1 sample." in text and "1 sample without" in text


def test_an_attic_is_advised_only_for_what_it_saves_and_its_memory_is_named() -> None:
    full, plain = results(FULL, 1.0, [1.0] * 4), results("h2o", 0.25, [1.0] * 4)
    with_attic = Variant("h2o", attic=True)
    advice = recommend([*full, *plain, *results(with_attic, 0.25, [1.0] * 4)], [], 0.01)
    assert advice.choice is not None and advice.choice.variant == Variant("h2o")
    worse = [replace(r, outcome=replace(r.outcome, score=0.5)) for r in plain]
    advice = recommend([*full, *worse, *results(with_attic, 0.25, [1.0] * 4)], [], 0.01)
    assert advice.choice is not None and advice.choice.variant == with_attic
    assert "with h2o with attic" in advice.headline
    assert any("host's memory" in reason for reason in advice.reasons)


def test_the_advice_says_what_to_type() -> None:
    full = results(FULL, 1.0, [1.0])
    types = "--cache-type-k q8_0 --cache-type-v q8_0"
    for variant, words in (
        (Variant("h2o"), "--policy h2o --kv-budget 250."),
        (Variant("h2o", type_k="q8_0", type_v="q8_0"), f"--policy h2o --kv-budget 250 {types}."),
        (Variant(FULL, type_k="q8_0", type_v="q8_0"), f"--policy none {types}."),
        (Variant("h2o", attic=True), "--policy h2o --kv-budget 250 --attic ram."),
        (Variant("h2o", attic=True, recall_every=64), "--kv-budget 250 --attic ram --recall-every 64."),
    ):
        advice = recommend([*full, *results(variant, 0.25, [1.0])], [], 0.01)
        assert words in advice.reasons[1]
    once = [replace(r, cell=replace(r.cell, mode="one-shot")) for r in (*full, *results("h2o", 0.25, [1.0]))]
    assert not any("--policy" in reason for reason in recommend(once, [], 0.01).reasons)


def test_many_samples_and_narrow_intervals_prove_it() -> None:
    measured = [*results(FULL, 1.0, [1.0] * 300), *results("h2o+", 0.25, [1.0] * 300)]
    assert recommend(measured, [fidelity("h2o+", 0.25, 0.995, 1.009)], 0.01).is_proven
    doubted = recommend(measured, [fidelity("h2o+", 0.25, 0.995, 1.011)], 0.01)
    assert doubted.choice is not None and doubted.choice.worst == pytest.approx(0.003)
    assert not doubted.is_proven and "interval of the perplexity" in " ".join(doubted.reasons)


def test_both_the_answers_and_the_text_must_hold() -> None:
    measured = [
        *results(FULL, 1.0, [1.0] * 9),
        *results("h2o+", 0.25, [1.0] * 9),
        *results("h2o+", 0.5, [1.0] * 9),
    ]
    texts = [fidelity("h2o+", 0.25, 1.02, 1.04), fidelity("h2o+", 0.5, 1.0, 1.01)]
    advice = recommend(measured, texts, 0.01)
    assert advice.choice is not None and advice.choice.kept == 0.5
    assert recommend(measured, texts, 0.05).choice.kept == 0.25  # type: ignore[union-attr]


def test_the_better_policy_wins_at_one_budget() -> None:
    measured = [
        *results(FULL, 1.0, [1.0] * 100),
        *results("h2o", 0.25, [1.0] * 99 + [0.0]), *results("h2o+", 0.25, [1.0] * 100),
    ]  # fmt: skip
    advice = recommend(measured, [], 0.01)
    assert advice.choice is not None and advice.choice.variant.policy == "h2o+"


def test_a_control_that_does_as_well_is_not_hushed_up() -> None:
    measured = [
        *results(FULL, 1.0, [1.0] * 9), *results("h2o+", 0.25, [1.0] * 9), *results(RANDOM, 0.25, [1.0] * 9)
    ]  # fmt: skip
    assert "do not show what the policy is worth" in " ".join(recommend(measured, [], 0.01).reasons)


def test_without_a_budget_that_holds_the_full_cache_stays() -> None:
    measured = [
        *results(FULL, 1.0, [1.0] * 4), *results("h2o+", 0.5, [0.9] * 4), *results("h2o+", 0.25, [0.0] * 4)
    ]  # fmt: skip
    advice = recommend(measured, [], 0.01)
    assert advice.choice is None and advice.headline.startswith("Keep the full cache")
    assert "10.0 (10.0 to 10.0) points" in advice.reasons[0] and "50%" in advice.reasons[0]


def test_where_the_full_cache_fails_everything_no_loss_is_named() -> None:
    advice = recommend([*results(FULL, 1.0, [0.5] * 4), *results("h2o+", 0.25, [0.5] * 4)], [], 0.01)
    text = " ".join(advice.reasons)
    assert advice.choice is None and "take other tasks" in text and "least loss" not in text


def test_what_the_full_cache_fails_proves_nothing() -> None:
    measured = [*results(FULL, 1.0, [0.0] * 4), *results("h2o+", 0.25, [0.0] * 4)]
    advice = recommend(measured, [], 0.01)
    assert advice.choice is None and "below 80 % in a at 1,000 tokens (0%)" in advice.reasons[0]
    advice = recommend(measured, [fidelity("h2o+", 0.25, 1.0, 1.01)], 0.01)
    assert advice.choice is not None and "only perplexity counts" in advice.reasons[0]


@pytest.fixture
def report() -> Report:
    measured = [
        *results(FULL, 1.0, [1.0] * 4), *results("h2o+", 0.25, [1.0, 1.0, 1.0, 0.5]),
        *results("streaming", 0.25, [0.0] * 4), *results(FULL, 1.0, [0.5] * 4, "b"),
        *results("h2o+", 0.25, [0.5] * 4, "b"),
    ]  # fmt: skip
    texts = [fidelity(FULL, 1.0, 1.0, 1.0), fidelity("h2o+", 0.25, 0.99, 1.02)]
    about = {"model": "<m>.gguf", "model_sha256": "ab" * 32, "date": "2026-01-01", "cpu": "a CPU", "cores": 2,
             "runtime": "1"}  # fmt: skip
    settings = {
        "mode": "bounded",
        "question": "hidden",
        "n_samples": 4,
        "seed": 0,
        "n_batch": 128,
        "n_threads": 1,
    }
    low = tuple((*key, score) for key, score in floors(measured).items())
    return Report(
        about, settings, tuple(summarize(measured)), low, tuple(texts), recommend(measured, texts, 0.2),
        tuple(measured),
    )  # fmt: skip


def test_the_page_needs_nothing_else_and_ends_in_the_advice(report: Report, tmp_path: Path) -> None:
    written = write_files(report, tmp_path / "new" / "out.v1")
    assert [path.name for path in written] == ["out.v1.html", "out.v1.json", "out.v1.md"]
    page = written[0].read_text()
    assert "<svg" in page and "&lt;m&gt;.gguf" in page and "<m>.gguf" not in page
    assert not re.search(r'(src|href)="(?!#)|url\((?!#)|@import|<script', page)
    assert {url.split("/")[2] for url in re.findall(r"https?://[^\s\"<]+", page)} == {"www.w3.org"}
    assert "default-src 'none'" in page
    end = unescape(page[page.index("<h2>Recommendation") :])
    assert report.recommendation.headline in end
    assert all(reason in end for reason in report.recommendation.reasons)
    for word in ("25% (250)", "sha256 abababababababab", "seed 0", "Samples of each task and length: 4"):
        assert word in page
    data = json.loads(written[1].read_text())
    assert len(data["results"]) == 20 and data["recommendation"]["headline"] == report.recommendation.headline


def test_every_row_of_markdown_has_all_its_columns(report: Report) -> None:
    lines = [line for line in write_markdown(report).splitlines() if line.startswith("|")]
    assert [line.count("|") for line in lines] == [13] * (2 + len(report.rows)) + [12] * (
        2 + len(report.fidelity)
    )
    assert "b at 1,000 (50%)" in write_markdown(report)
