"""Cells, the runner, what it keeps on disk, and the statistics: with answers that nobody computes."""

from __future__ import annotations

import json
import pickle
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import FakeAttic, evicting

from h2o_gguf import policies
from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.evaluation import bootstrap_ratio
from h2o_gguf.evaluation.answering import read_blocks
from h2o_gguf.evaluation.cells import Cell, Outcome, budget_of, plan
from h2o_gguf.evaluation.one_shot import sharing
from h2o_gguf.evaluation.runner import Result, batches, n_tokens_left, run
from h2o_gguf.evaluation.settings import QUICK_RUN, Settings
from h2o_gguf.evaluation.sources import policy_key
from h2o_gguf.evaluation.statistics import bootstrap, hidden_loss, samples_needed
from h2o_gguf.evaluation.store import Store
from h2o_gguf.evaluation.summary import ALL, floors, summarize
from h2o_gguf.evaluation.variants import AUTO, FULL, Variant, compared, with_attics, with_controls
from h2o_gguf.recalls import Recalls

FACTS = {"model": "m"}


def outcome(score: float = 1.0) -> Outcome:
    return Outcome(
        score=score, answer="", n_context=900, n_question=90, n_answer=10, n_kept=250, kept_bytes=1000,
        peak_bytes=2000, context_s=9.0, question_s=0.9, answer_s=2.0,
    )  # fmt: skip


class Answers:
    """Notes what it is asked; scores what it is told; breaks off before a number of answers."""

    def __init__(self, breaks_at: int | None = None) -> None:
        self.asked: list[Cell] = []
        self.batches: list[list[Cell]] = []
        self.breaks_at = breaks_at

    def __call__(self, cells: Sequence[Cell]) -> Iterator[tuple[Cell, Outcome]]:
        self.batches.append(list(cells))
        for cell in cells:
            if len(self.asked) == self.breaks_at:
                raise KeyboardInterrupt
            self.asked.append(cell)
            yield cell, outcome(len(self.asked))


def cells_of(n_samples: int = 3, **options: Any) -> list[Cell]:
    variants = [Variant("h2o+"), Variant("streaming")]
    return plan(variants, [0.5, 0.25], ["multikey"], [1000], n_samples=n_samples, **options)


def test_every_cell_is_planned_once_the_full_cache_first() -> None:
    cells = plan(
        [Variant("h2o+"), Variant("random", like="h2o+")], [0.5, 100], ["multikey", "stack"], [1000, 2000],
        n_samples=3,
    )  # fmt: skip
    assert len(cells) == len(set(cells)) == 2 * 2 * 3 * (1 + 2 * 2)
    assert all(cell.variant.is_full and cell.budget == cell.length for cell in cells[:12])
    assert {(c.length, c.kept, c.budget) for c in cells[12:]} == {
        (1000, 0.5, 500), (1000, 100, 100), (2000, 0.5, 1000), (2000, 100, 100)
    }  # fmt: skip


@pytest.mark.parametrize("kept", [0, -1, 1000, 2000, 0.0001, 0.9999])
def test_a_budget_that_keeps_all_or_nothing_is_refused(kept: float) -> None:
    with pytest.raises(OptionError, match=f"{kept} of 1000 tokens"):
        budget_of(kept, 1000)
    assert [budget_of(share, 1000) for share in (0.25, 250, 0.001, 999)] == [250, 250, 1, 999]


def test_a_second_run_asks_only_what_is_new(tmp_path: Path) -> None:
    with closing(Store(tmp_path, FACTS)) as store:
        first = list(run(cells_of(), Answers(), store))
        assert all(result.is_new for result in first)
    answers = Answers()
    with closing(Store(tmp_path, FACTS)) as store:
        second = list(run(cells_of(4), answers, store))
    assert {cell.index for cell in answers.asked} == {3} and len(answers.asked) == 5
    old = {result.cell: result.outcome for result in first}
    assert {r.cell: r.outcome for r in second if not r.is_new} == old


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    cells = cells_of()
    with closing(Store(tmp_path, FACTS)) as store, pytest.raises(KeyboardInterrupt):
        list(run(cells, Answers(breaks_at=5), store))
    answers = Answers()
    with closing(Store(tmp_path, FACTS)) as store:
        results = list(run(cells, answers, store))
    assert len(answers.asked) == len(cells) - 5
    assert {result.cell for result in results} == set(cells)
    assert sum(not result.is_new for result in results) == 5


@pytest.mark.parametrize("folder", [None, "here"])
def test_another_model_or_no_folder_knows_nothing(tmp_path: Path, folder: str | None) -> None:
    where = tmp_path / folder if folder else None
    for facts in (FACTS, {"model": "other"}):
        answers = Answers()
        with closing(Store(where, facts)) as store:
            list(run(cells_of(), answers, store))
        assert len(answers.asked) == len(cells_of())


@dataclass(frozen=True)
class Bomb:
    """What a pickle of it does when it is read."""

    path: Path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("damage", ["no zip", "other fields", "no number", "a pickle"])
def test_a_damaged_result_is_measured_again(tmp_path: Path, damage: str) -> None:
    mode, value = {
        "no zip": (1, b"?"),
        "other fields": (1, zlib.compress(b'{"a": 1}')),
        "no number": (1, zlib.compress(json.dumps(outcome().as_dict() | {"score": "x"}).encode())),
        "a pickle": (4, pickle.dumps(Bomb(tmp_path / "ran"))),
    }[damage]
    with closing(Store(tmp_path, FACTS)) as store:
        list(run(cells_of(), Answers(), store))
    with closing(sqlite3.connect(tmp_path / "cache.db")) as database:
        database.execute("UPDATE Cache SET mode = ?, value = ?", (mode, value))
        database.commit()
    answers = Answers()
    for asked in (len(cells_of()), len(cells_of())):  # and kept anew
        with closing(Store(tmp_path, FACTS)) as store:
            list(run(cells_of(), answers, store))
        assert len(answers.asked) == asked
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_cannot_keep_results_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "cache.db").write_text("no database, but long enough to be taken for the header of one")
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OptionError, match=f"cannot be kept in {str(folder)!r}.*--cache off"):
            Store(folder, FACTS)


def test_progress_counts_what_is_left_to_do(tmp_path: Path) -> None:
    with closing(Store(tmp_path, FACTS)) as store:
        list(run(cells_of(1), Answers(), store))
        seen: list[tuple[int, int]] = []
        assert n_tokens_left(cells_of(2), store) == 5000
        list(run(cells_of(2), Answers(), store, lambda n, total: seen.append((n, total))))
    assert seen == [(1000 * n, 5000) for n in range(6)]


def test_bounded_batches_share_a_cache_and_one_shot_ones_a_length() -> None:
    bounded = batches(cells_of())
    assert len(bounded) == 5 and all(len({(c.variant, c.budget) for c in batch}) == 1 for batch in bounded)
    assert bounded[0][0].variant.is_full
    assert len(batches(cells_of(mode="one-shot"))) == 1


@dataclass(frozen=True)
class Tracing:
    """A policy that carries a number along with every entry."""

    budget: int
    name = "tracing"
    n_trace = 1
    n_observed = 8

    def victims(self, view: Any, n: int) -> Any:
        raise NotImplementedError

    def observe(self, view: Any) -> Any:
        raise NotImplementedError


def test_one_reading_serves_policies_that_need_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["h2o", "h2o+", "streaming", "random"]
    variants = [Variant(name) for name in names]
    cells = plan(variants, [0.5, 0.25], ["stack"], [1000], n_samples=1, mode="one-shot")
    groups = sharing(cells)
    assert sorted(cell for group in groups for cell in group) == sorted(cells)
    assert [{c.variant.policy for c in group} for group in groups] == [
        {"h2o", FULL, "streaming", "random"}, {"h2o+"}
    ]  # fmt: skip
    assert groups[0][0].variant.policy == "h2o"  # whose scores the reading sums
    frugal = [cell for cell in cells if cell.variant.policy not in ("h2o", "h2o+")]
    assert sharing(frugal) == [frugal]
    monkeypatch.setitem(policies.registry.OURS, "tracing", Tracing)
    traced = plan([Variant("tracing")], [0.5, 0.25], ["stack"], [1000], n_samples=2, mode="one-shot")[2:]
    assert [len(group) for group in sharing([*traced, *frugal])] == [len(traced) + len(frugal)]
    assert len(sharing([*traced, *cells])) == 3, "whose traces a session keeps"


def test_random_gets_the_sinks_and_window_of_each_policy() -> None:
    variants = with_controls(["h2o+", "h2o"], [100, 200])
    assert [v.name for v in variants] == ["h2o+", "h2o", "streaming", "random like h2o+", "random like h2o"]
    for budget in (100, 200):
        for like, control in ((variants[0], variants[3]), (variants[1], variants[4])):
            made, twin = like.make(budget), control.make(budget)
            assert (twin.n_sink, twin.n_recent, twin.budget) == (made.n_sink, made.n_recent, budget)
            assert twin.name == "random"
    split = with_controls(["h2o", "pyramidkv", "streaming"], [100], ["pyramid:2"])
    assert [v.name for v in split if v.layers] == ["h2o by pyramid:2"], "pyramidkv has its own"
    assert [v.name for v in with_controls(["streaming"], [100])] == ["streaming", "random like h2o+"]
    with pytest.raises(OptionError, match="no policy is called 'x'"):
        with_controls(["x"], [100])
    with pytest.raises(BudgetError, match=r"3 entries .* h2o\+, which protects 4: .*--kept"):
        with_controls(["h2o+"], [3])
    with pytest.raises(BudgetError, match=r"3 entries .* streaming, which protects 4"):
        with_controls(["knorm"], [3])


def test_everything_that_evicts_comes_again_with_an_attic() -> None:
    plain = with_controls(["h2o+"], [100], ["pyramid:2"])
    assert [v.name for v in with_attics([Variant(FULL), *plain])] == [
        "none", "h2o+", "h2o+ with attic", "streaming", "streaming with attic", "h2o+ by pyramid:2",
        "h2o+ by pyramid:2 with attic", "random like h2o+", "random like h2o+ with attic",
    ]  # fmt: skip
    small = with_attics(compared(["h2o"], ["q8_0"], [100]), 64)
    assert {v.name for v in small if v.attic and v.policy == "h2o"} == {
        "h2o with attic every 64", "h2o with attic every 64, q8_0"
    }  # fmt: skip
    for variant in with_attics(plain, 64):
        assert variant.make(100) == replace(variant, attic=False, recall_every=AUTO).make(100)


def test_what_an_attic_changes_is_kept_apart(tmp_path: Path) -> None:
    first = cells_of()
    others = [
        replace(cell, variant=replace(cell.variant, attic=True, recall_every=every))
        for cell in first
        if not cell.variant.is_full
        for every in (0, 64)
    ]
    answers = Answers()
    with closing(Store(tmp_path, FACTS)) as store:
        results = list(run([*first, *others], answers, store))
        assert len(answers.asked) == len(first) + len(others)
        assert {(row.variant, row.kept) for row in summarize(results)} == {
            (cell.variant, cell.kept) for cell in (*first, *others)
        }
    for batch in answers.batches:
        assert len({cell.variant for cell in batch}) == 1, "a cache with an attic is one of its own"


def test_no_attic_no_recalls() -> None:
    others = {"cache": "off", "seed": 0, "text": None, "n_batch": 128, "n_threads": 1, "n_gpu_layers": 0}
    settings = Settings.of(QUICK_RUN, attic=True, recall_every=64, **others)
    assert (settings.attic, settings.recall_every) == (True, 64)
    with pytest.raises(OptionError, match=r"recall_every is 64: .* without an attic"):
        Settings.of(QUICK_RUN, recall_every=64, **others)


def test_the_last_block_of_a_question_recalls_and_no_other() -> None:
    e, context, _ = evicting(n_batch=40)
    attic = FakeAttic(context)
    e.recalls = Recalls(attic)  # type: ignore[arg-type]
    read_blocks(e, [1] * 100, 40)
    assert attic.asked == []
    read_blocks(e, [2] * 90, 40, recall=True)
    assert [len(batch) for batch in context.batches] == [40, 40, 20, 40, 34, 16]
    assert attic.asked == [100 + 90 - 16], "the newest 16 see what was recalled"
    read_blocks(e, [3] * 5, 40, recall=True)
    assert attic.asked[1:] == [190]


def test_a_cache_type_is_compared_once() -> None:
    found = compared(["h2o"], ["Q8_0", "q8_0 ", "f16"], [100])
    assert sorted(v.name for v in found) == [
        "h2o", "h2o, q8_0", "none, q8_0", "random like h2o", "streaming"
    ]  # fmt: skip
    for word in ("q9", ""):
        with pytest.raises(OptionError, match=f"'{word}': there are f32, f16"):
            compared(["h2o"], [word], [100])


def test_a_changed_knob_or_policy_is_another_key() -> None:
    first = policies.make("h2o+", 100)
    assert policy_key(first) == policy_key(policies.make("h2o+", 100))
    others = (policies.make("h2o+", 101), policies.make("h2o+", 100, n_sink=5), policies.make("h2o", 100))
    assert len({policy_key(policy) for policy in (first, *others)}) == 4


# Statistics


def test_the_bootstrap_of_a_mean_has_its_standard_error() -> None:
    """Of n equal-weight draws the standard error is the population's deviation over the root of n."""
    values = np.random.default_rng(0).normal(5.0, 2.0, 400)
    found = bootstrap([values])
    half = 1.96 * values.std() / 20
    assert found.mean == pytest.approx(values.mean()) and found.n == 400
    assert found.low == pytest.approx(values.mean() - half, abs=0.02)
    assert found.high == pytest.approx(values.mean() + half, abs=0.02)


def test_the_interval_covers_the_true_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = sum(
        found.low <= 0.5 <= found.high
        for found in (bootstrap([rng.random(40), rng.random(40)], seed=i) for i in range(300))
    )
    assert 0.91 <= hits / 300 <= 0.98


@pytest.mark.parametrize("n", [8, 32, 480])
def test_the_interval_of_a_short_text_has_a_width(n: int) -> None:
    """Half of eight blocks cost one nat more: of a binomial (8, 1/2), 95 % lie between 1 and 7."""
    nll = np.repeat([0.0, 1.0], n // 2)
    assert bootstrap_ratio(nll, np.zeros(len(nll))) == pytest.approx((np.exp(1 / 8), np.exp(7 / 8)))
    assert bootstrap_ratio(np.ones(3), np.zeros(3)) == pytest.approx((np.e, np.e))


def test_groups_count_alike_whatever_their_size() -> None:
    found = bootstrap([[0.0] * 10, [1.0]])
    assert (found.mean, found.low, found.high, found.n) == (0.5, 0.5, 0.5, 11)


def test_what_samples_without_a_loss_hide() -> None:
    assert hidden_loss(1) == pytest.approx(0.95) and hidden_loss(0) == 1.0
    assert hidden_loss(300) == pytest.approx(3 / 300, rel=0.01)  # the rule of three
    assert samples_needed(0.01) == 299 and hidden_loss(299) <= 0.01 < hidden_loss(298)


# Rows


def results_of(scores: dict[tuple[str, str], list[float]]) -> list[Result]:
    """From (policy, task): scores by sample, at half of 1,000 tokens."""
    cell = cells_of(1)[1]
    found = []
    for (policy, task), each in scores.items():
        for index, score in enumerate(each):
            of = {"variant": Variant(policy), "task": task, "index": index}
            if policy == FULL:
                of |= {"kept": 1.0, "budget": 1000}
            found.append(Result(replace(cell, **of), outcome(score), True))
    return found


def test_tasks_the_full_cache_fails_do_not_count() -> None:
    results = results_of(
        {
            (FULL, "a"): [1, 1, 1, 0], (FULL, "b"): [1, 1, 1, 0.2],
            ("h2o+", "a"): [0, 0, 0, 0], ("h2o+", "b"): [1, 0, 1, 0.2],
        }
    )  # fmt: skip
    assert floors(results) == {(1000, "a"): 0.75}
    rows = {(row.variant.policy, row.task): row for row in summarize(results)}
    assert set(rows) == {(FULL, "a"), (FULL, "b"), (FULL, ALL), ("h2o+", "a"), ("h2o+", "b"), ("h2o+", ALL)}
    row = rows["h2o+", ALL]
    assert row.score.mean == pytest.approx(0.55) and row.score.n == 4
    assert row.loss is not None and row.loss.mean == pytest.approx(0.25)
    assert (row.read_rate, row.write_rate, row.first_token_s) == (100.0, 5.0, pytest.approx(9.9))


def test_losses_are_paired_by_sample() -> None:
    """Two caches that are right about different samples lose nothing on the whole, but surely differ."""
    same = results_of({(FULL, "a"): [1, 1, 1, 1, 0], ("h2o", "a"): [1, 1, 1, 1, 0]})
    other = results_of({(FULL, "a"): [1, 1, 1, 1, 0], ("h2o", "a"): [0, 1, 1, 1, 1]})
    for results, width in ((same, 0.0), (other, 0.4)):
        (row,) = (row for row in summarize(results) if row.variant.policy == "h2o" and row.task == ALL)
        assert row.loss is not None and row.loss.mean == pytest.approx(0)
        assert row.loss.high - row.loss.low == pytest.approx(0) if not width else row.loss.high >= width


# Settings


def settings(**options: Any) -> Settings:
    given = {
        "policies": None, "kept": "0.5", "tasks": None, "lengths": None, "mode": "bounded",
        "question": "hidden", "cache": "off", "tolerance": 1.0, "n_samples": 1, "seed": 0, "n_batch": 128,
        "n_threads": 1, "n_gpu_layers": 0, "text": None,
    }  # fmt: skip
    return Settings.of(QUICK_RUN, **(given | options))


def test_settings_come_from_words() -> None:
    found = settings(kept="0.5, 0.25,64", lengths=[512, 256, 512], tasks=["stack"], cache="x")
    assert found.kept == (0.5, 0.25, 64) and found.lengths == (256, 512) and found.tasks == ("stack",)
    assert found.folder == Path("x") and found.tolerance == 0.01 and settings().folder is None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"kept": "half"}, "'half'"), ({"kept": "1.5"}, "1.5"), ({"kept": "0"}, "kept 0"),
        ({"kept": "nan"}, "nan"), ({"kept": "2000"}, "2000"), ({"mode": "x"}, "one-shot"),
        ({"question": "x"}, "hidden"), ({"tasks": ["x"]}, "'x'"), ({"tolerance": 0}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_in_words(options: dict[str, Any], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        settings(**options)
