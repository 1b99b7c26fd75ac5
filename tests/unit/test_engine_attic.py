"""Which batches recall, on a context that is only books, and what is handed over as protected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import FakeAttic, FakeCache, FakeContext, Greedy, evicting, logits_are_right, take

from h2o_gguf.attic import LAST, N_QUESTION, N_TEXT, Asking, Attic, AtticOptions
from h2o_gguf.engine import Engine
from h2o_gguf.errors import OptionError
from h2o_gguf.policies import LayerBudgets, Policy, make
from h2o_gguf.recalls import Recalls


def with_attic(
    budget: int = 20, n_batch: int = 64, *, is_empty: bool = False, every: int = 0
) -> tuple[Engine, FakeContext, FakeCache, FakeAttic]:
    e, context, cache = evicting(budget, n_batch=n_batch)
    attic = FakeAttic(context, every, is_empty=is_empty, budget=budget)
    e.recalls = Recalls(attic)  # type: ignore[arg-type]
    return e, context, cache, attic


def sizes(context: FakeContext) -> list[int]:
    return [len(batch) for batch in context.batches]


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, [1]),
        (N_QUESTION, [N_QUESTION]),
        (2 * N_QUESTION - 1, [2 * N_QUESTION - 1]),  # a rest is too short for a text
        (2 * N_QUESTION, [N_QUESTION, N_QUESTION]),
        (64, [48, N_QUESTION]),
        (64 + N_QUESTION, [64, N_QUESTION]),
        (65 + N_QUESTION, [64, 1, N_QUESTION]),
        (150, [64, 64, 6, N_QUESTION]),
    ],
)
def test_the_last_16_tokens_are_a_batch_of_their_own_and_recall(n: int, expected: list[int]) -> None:
    e, context, _, attic = with_attic()
    e.prefill([1] * n, recall=True)
    assert sizes(context) == expected
    assert attic.asked == [n - expected[-1]]
    assert e.tokens == [1] * n and logits_are_right(e, context)


def test_batches_smaller_than_a_question_recall_in_the_last_of_them() -> None:
    e, context, _, attic = with_attic(n_batch=10)
    e.prefill([1] * 35, recall=True)
    assert sizes(context) == [10, 10, 5, 10] and attic.asked == [25]


def test_nothing_is_cut_or_recalled_unless_asked_for_and_there_is_something() -> None:
    e, context, _, attic = with_attic()
    e.prefill([1] * 96)
    assert sizes(context) == [64, 32] and attic.asked == []
    e, context, _, attic = with_attic(budget=500, is_empty=True)
    e.prefill([1] * 90, recall=True)
    assert sizes(context) == [64, 26] and attic.asked == []
    e, context, _ = evicting(20, n_batch=64)
    e.prefill([1] * 90, recall=True)
    assert sizes(context) == [64, 26]


def test_a_prompt_that_fills_the_attic_itself_recalls_at_its_end() -> None:
    """Empty when it begins, which is when it is cut."""
    e, context, _, attic = with_attic(is_empty=True)

    def fill() -> None:
        attic.is_empty = len(context.seen) <= 20

    context.before = fill
    e.prefill([1] * 129, recall=True)
    assert sizes(context) == [64, 49, N_QUESTION] and attic.asked == [113]


@pytest.mark.parametrize(
    ("n", "recall", "texts", "asked"),
    [
        (200, False, [100, 164, 228], []),  # the last 8 are too few
        (96, False, [100, 164], []),
        (15, False, [], []),
        (96, True, [100, 164], [180]),
        (40, True, [100], [124]),
        (31, True, [], [100]),
    ],
)
def test_a_text_recalls_for_itself_batch_by_batch(
    n: int, recall: bool, texts: list[int], asked: list[int]
) -> None:
    e, _, _, attic = with_attic(n_batch=64)
    attic.is_empty, attic.budget = True, 100
    e.prefill([1] * 100)
    assert attic.texts == []
    attic.is_empty = False
    e.prefill([1] * n, recall=recall)
    assert (attic.texts, attic.asked) == (texts, asked)
    e.recalls.is_on = False
    e.prefill([1] * 64)
    assert attic.texts == texts


def test_small_batches_of_a_text_recall_too_and_single_tokens_do_not() -> None:
    e, _, _, attic = with_attic(n_batch=10)
    e.prefill([1] * 25)
    e.prefill([1])
    assert attic.texts == [0, 10]


def test_a_text_is_not_read_three_times() -> None:
    e, context, _ = evicting()
    attic = FakeAttic(context, n_asking=2)
    e.recalls = Recalls(attic)  # type: ignore[arg-type]
    e.prefill([1] * 40)
    assert attic.texts == attic.exchanged == []


def test_what_a_prompt_adds_recalls_and_can_be_told_not_to() -> None:
    e, context, _, attic = with_attic(budget=200)
    e.sync([1] * 100)
    e.sync([1] * 100 + [2] * 10)
    assert attic.asked == [84, 100] and sizes(context)[-1] == 10
    e.sync([1] * 100 + [2] * 20, recall=False)
    assert attic.asked == [84, 100]


def test_a_recall_on_demand_reads_the_newest_tokens_again() -> None:
    e, context, cache, attic = with_attic(budget=200)
    e.prefill([*range(1, 40)] * 2)
    before = list(e.tokens)
    e.recall()
    assert attic.texts[1:] == [78 - N_QUESTION - N_TEXT] and attic.asked == [78 - N_QUESTION]
    assert sizes(context)[-2:] == [N_TEXT, N_QUESTION]
    e.recall(5)
    assert attic.asked[1:] == [73] and sizes(context)[-1] == 5
    assert e.tokens == context.seen == before and logits_are_right(e, context)
    cache.rollback_min = lambda: 70  # type: ignore[method-assign]
    e.recall()
    assert attic.asked[2:] == [70], "no further than is exact"
    assert e.tokens == before
    cache.rollback_min = lambda: 78  # type: ignore[method-assign]
    with pytest.raises(OptionError, match="cannot be read again"):
        e.recall()
    assert e.tokens == before and len(attic.asked) == 3


def test_a_recall_needs_an_attic_and_tokens() -> None:
    e, _, _ = evicting()
    with pytest.raises(OptionError, match="without an attic"):
        e.recall()
    e, _, _, _ = with_attic()
    with pytest.raises(OptionError, match="cannot be read again"):
        e.recall()


@pytest.mark.parametrize(("every", "expected"), [(0, []), (1, [3, 4, 5, 6]), (2, [4, 6]), (5, [])])
def test_every_so_many_generated_tokens_recall(every: int, expected: list[int]) -> None:
    e, _, _, attic = with_attic(every=every)
    e.prefill([1, 2, 3])
    assert len(take(e, 5)) == 5
    assert attic.asked == expected, "the last one chosen is not decoded"


def test_pins_are_handed_over() -> None:
    e, _, _, attic = with_attic(every=1)
    e.sync([1] * 15, pins=[(2, 5)])
    next(iter_ := e.generate(Greedy(), max_tokens=3))
    next(iter_)
    assert attic.pins == [((2, 5),)] * len(attic.asked) and attic.asked == [0, 15]


# -- the attics of the groups ------------------------------------------------------------------------------


@dataclass
class Group:
    """A native cache of some layers, whose attic notes what it is told."""

    layer_ids: tuple[int, ...]
    n_head_kv: int = 2
    told: list[dict[str, Any]] = field(default_factory=list)
    n_entry: int = 0
    n_recalled: int = 0
    n_back: int = 0  # what comes back each time
    n_dropped: int = 0
    is_host: bool = True

    @property
    def n_layer(self) -> int:
        return len(self.layer_ids)

    @property
    def info(self) -> Any:
        return SimpleNamespace(is_host=self.is_host)

    @property
    def attic(self) -> Any:
        return SimpleNamespace(
            open=self.open,
            info=self.attic_info,
            recall_next=self.recall_next,
            withdraw=self.withdraw,
            recall_asked=self.recall_asked,
        )

    def open(self, max_bytes: int, **options: Any) -> None:
        self.told.append({"max_bytes": max_bytes, **options})

    def attic_info(self) -> Any:
        return SimpleNamespace(
            n_entry=self.n_entry, bytes=100, n_recalled=self.n_recalled, n_dropped=self.n_dropped
        )

    def recall_next(self, keep: Any, **options: Any) -> None:
        self.told.append({"keep": list(keep), **options})

    def withdraw(self) -> None:
        self.told.append({"withdrawn": True})

    def recall_asked(self) -> None:
        self.told.append({"asked": True})
        self.n_recalled += self.n_back


def attic_of(policy: Policy, *groups: Group, **options: Any) -> Attic:
    return Attic(groups, policy, AtticOptions("ram", **options))


def test_sinks_pins_and_window_stay_and_no_more_comes_back_than_can_stay() -> None:
    group = Group((0, 1))
    attic = attic_of(make("h2o", 100, n_sink=4, n_recent=30), group)
    attic.recall_next(500, [(0, 10), (200, 220)])
    assert group.told[-1] == {
        "keep": [(0, 4), (0, 10), (200, 220), (470, LAST)],
        "n_most": 100 - 4 - 30 - 6 - 20,  # of the first pin, four are sinks
        "n_asked": 8,
        "n_before": 2,
        "n_after": 8,
        "n_exact": 256,
        "alike": "head",
    }
    attic.recall_next(500, [(100, 190)])
    assert group.told[-1]["n_most"] == 0
    # 100 come with 9 queries, 11 with each; of a large attic no more than 8 ask.
    for budget, n_entry, n_asked in ((134, 99, 9), (300, 16384, 16), (3000, 99, 16), (3000, 16385, 8)):
        group = Group((0, 1), n_entry=n_entry)
        attic_of(make("h2o", budget, n_sink=4, n_recent=30), group).recall_next(500, [])
        assert group.told[-1]["n_asked"] == n_asked


@pytest.mark.parametrize(("n_entry", "every"), [(1, 1), (4096, 1), (4097, 2), (8192, 2), (30_000, 8)])
def test_every_token_of_a_text_asks_until_the_attic_is_large(n_entry: int, every: int) -> None:
    group = Group((0, 1), n_entry=n_entry)
    attic_of(make("h2o", 100, n_sink=4, n_recent=30), group).recall_next(500, [(200, 220)], "text")
    assert group.told[-1] == {
        "keep": [(0, 4), (200, 220), (470, LAST)],
        "n_most": (100 - 4 - 30 - 20) // 2,
        "ask_every": every,
        "n_after": every - 1,
        "n_exact": 0,
        "alike": "head",
    }


def test_texts_recall_where_that_costs_one_reading_and_all_layers_are_on_the_host() -> None:
    def serves(granularity: str, *groups: Group) -> bool:
        return attic_of(make("h2o", 100, granularity=granularity), *groups).serves_texts

    host, gpu = Group((0, 1)), Group((2, 3), is_host=False)
    assert serves("head", host) and serves("layer", host)
    assert not serves("token", host) and not serves("head", host, gpu)


def test_where_little_can_come_back_the_question_has_it_and_more_of_it_sees_it() -> None:
    def n_question(
        *budgets: int,
        pins: Sequence[tuple[int, int]] = (),
        is_host: bool = True,
        end: int = 20_000,
        **options: Any,
    ) -> int:
        groups = [Group((i,), is_host=is_host) for i in range(len(budgets))]
        knobs = {"n_sink": 4, "n_recent": 30, **options}
        policy = (
            LayerBudgets(list(budgets), "h2o", knobs)
            if len(budgets) > 1
            else make("h2o", budgets[0], **knobs)
        )
        return attic_of(policy, *groups).n_question(pins, end, 512)

    assert (n_question(161), n_question(162)) == (32, 16)
    assert n_question(162, pins=[(2, 5)]) == 32, "a pin takes what may go"
    assert n_question(500, 161) == 32 and n_question(500, 162) == 16
    assert n_question(500, granularity="token") == n_question(500, is_host=False) == 32, "no text recalls"
    # Where all of it attends to the attic, it is as much as that costs little for.
    ends = [500 + n for n in (100, 1024, 1025, 4096, 8192, 8193)]
    assert [n_question(500, end=end) for end in ends] == [256, 256, 255, 64, 32, 16]


@pytest.mark.parametrize(("n_entry", "n_exact"), [(1, 256), (4096, 64), (6000, 43), (8192, 32), (8193, 0)])
def test_a_question_attends_to_a_small_attic_as_to_the_cache(n_entry: int, n_exact: int) -> None:
    def exact(asking: Asking, granularity: str = "head", is_host: bool = True, **options: bool) -> list[int]:
        groups = (
            Group((0,), n_entry=n_entry, is_host=is_host),
            Group((1,), n_entry=n_entry // 2, is_host=True),
        )
        attic = Attic(groups, make("h2o", 100, granularity=granularity), AtticOptions("ram"), **options)
        attic.recall_next(9000, [], asking)
        return [group.told[-1]["n_exact"] for group in groups]

    assert exact("question") == [n_exact, n_exact]
    assert exact("text") == exact("reply") == exact("question", is_attended=False) == [0, 0]
    assert exact("question", "token") == exact("question", is_host=False) == [0, 0]


def test_each_group_has_the_numbers_of_its_own_budget_and_its_share_of_the_bytes() -> None:
    first, second = Group((0,)), Group((1, 2, 3))
    policy = LayerBudgets([80, 40, 40, 40], "h2o", {"n_sink": 4, "n_recent": 10})
    attic = attic_of(policy, first, second, limit=4000, type=8)
    assert [group.told[0] for group in (first, second)] == [
        {"max_bytes": n, "type_k": 8, "type_v": 8, "folder": None} for n in (1000, 3000)
    ]
    attic.recall_next(500, [])
    assert (first.told[1]["n_most"], second.told[1]["n_most"]) == (66, 26)
    attic.withdraw()
    assert first.told[-1] == second.told[-1] == {"withdrawn": True}


def test_a_report_counts_entries_of_a_head_and_the_last_turn_alone() -> None:
    first, second = Group((0,), n_entry=100), Group((1, 2, 3), n_entry=200)
    attic = attic_of(make("h2o", 100), first, second)
    assert not attic.is_empty and attic_of(make("h2o", 100), Group((0,))).is_empty
    first.n_recalled, second.n_recalled, second.n_dropped = 10, 30, 80
    attic.begin_turn()
    first.n_recalled, second.n_recalled = 20, 60
    report = attic.report()
    assert (report.entries, report.bytes, report.dropped) == (175, 200, 10)  # 8 heads
    assert report.recalled == 5.0  # 10 and 30 of 8 heads
    first.n_recalled = second.n_recalled = 0  # the sequence was cleared
    assert attic.report().recalled == 0.0


def test_left_to_itself_it_recalls_as_often_as_costs_little() -> None:
    def interval(weight_bytes: int, **options: Any) -> int:
        attic = Attic([Group((0,))], make("h2o", 100), AtticOptions("ram", **options), weight_bytes)
        return attic.interval()  # of 100 bytes, half of them keys

    assert [interval(n) for n in (10_000, 500, 250, 100, 0)] == [1, 1, 2, 5, 50]
    assert interval(100, every=3) == 3 and interval(100, every=0) == 0


def test_wrong_options_are_refused() -> None:
    for options, word in (({"place": "rom"}, "'rom'"), ({"limit": 0}, "0"), ({"limit": True}, "True")):
        with pytest.raises(OptionError, match=word):
            AtticOptions(**{"place": "ram", **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("alike", ["head", "layer", "token"])
def test_heads_that_evict_alike_recall_alike(alike: str) -> None:
    first, second = Group((0, 1)), Group((2, 3))
    attic = attic_of(make("h2o", 100, granularity=alike), first, second)
    attic.recall_next(500, [])
    assert first.told[-1]["alike"] == second.told[-1]["alike"] == alike
    assert attic.n_asking == (2 if alike == "token" else 0)
    attic.exchange_asked()
    attic.begin_turn()
    for is_counted, n_recalled in ((False, 0.0), (True, 10.0)):
        first.n_back = 80  # in 4 heads of 8
        attic.exchange_asked(is_counted=is_counted)
        assert attic.report().recalled == n_recalled
    assert first.told[-1] == second.told[-1] == {"asked": True}


def test_a_batch_that_only_asks_is_read_again_with_what_it_asked_for() -> None:
    e, context, _ = evicting()
    attic = FakeAttic(context, n_asking=2)
    e.recalls = Recalls(attic)  # type: ignore[arg-type]
    e.prefill([1] * 40)
    e.prefill([2] * 4, recall=True)
    assert context.batches[-3:] == [[2] * 4] * 3
    assert attic.asked == attic.exchanged == [40, 40], "forgotten before what it asked for comes back"
    assert e.tokens == [1] * 40 + [2] * 4 == context.seen


def test_a_recall_that_asks_twice_reads_the_weights_twice_more() -> None:
    policy = make("h2o", 100, granularity="token")
    assert Attic([Group((0,))], policy, AtticOptions("ram"), 1000).interval() == 21  # 50 bytes of keys


def test_a_full_attic_is_taken_to_stay_as_it_is() -> None:
    group = Group((0,), n_entry=1000)
    attic = attic_of(make("h2o", 100), group)
    assert attic.n_question([], 20_100, 512) == 32
    group.n_dropped = 1
    assert attic.n_question([], 20_100, 512) == 256


def test_a_batch_that_is_the_first_to_evict_recalls() -> None:
    e, _, _, attic = with_attic(budget=20, n_batch=64, is_empty=True)
    e.prefill([1] * 20, recall=True)
    assert attic.asked == attic.texts == []
    e.prefill([1] * 30, recall=True)
    e.prefill([1] * 30)
    assert (attic.asked, attic.texts) == ([20], [50])
