"""The tasks' samples: they fit, they hold what is asked for, where it should be, and they repeat."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from h2o_gguf import policies
from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.evaluation.answering import pins_of
from h2o_gguf.evaluation.haystack import NOISE, Haystack, hide
from h2o_gguf.evaluation.prompting import Prompt, Prompter
from h2o_gguf.evaluation.sample import Check, Sample, fit, score
from h2o_gguf.evaluation.tasks import GROUPS, TASKS, choose, make_samples
from h2o_gguf.evaluation.texts import prose
from h2o_gguf.pins import check_pins

TEXT = " ".join(f"Sentence number {i} of the text." for i in range(50))


class Plain:
    """A template of bare words."""

    def render(self, messages: list[dict[str, str]], *, opens_reply: bool) -> str:
        return "".join(f"<{m['role']}> {m['content']}\n" for m in messages) + "<reply> " * opens_reply


def words_of(text: str) -> list[int]:
    return [hash(word) for word in re.findall(r"\w+|[^\w\s]", text)]


PROMPTER = Prompter(Plain(), words_of)


def made(task: str, length: int = 1500, seed: int = 0, index: int = 0) -> Sample:
    return make_samples(task, length, seed, index, Haystack(TEXT), PROMPTER.count)[task]


def said(sample: Sample) -> str:
    return "\n".join([*(text for _, text in sample.history), sample.context])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("length", [1500, 4100])
def test_a_sample_fills_its_length_and_no_more(task: str, length: int) -> None:
    n = PROMPTER.count(made(task, length))
    assert 0.95 * length < n <= length


@pytest.mark.parametrize("task", TASKS)
def test_what_is_asked_for_is_in_the_context_and_not_in_the_question(task: str) -> None:
    for index in range(5):
        sample = made(task, index=index)
        for check in sample.checks:
            assert check.text in said(sample)
            assert check.text not in sample.question + sample.prefix
        right = " and ".join(check.text for check in sample.checks)
        assert score(sample, right) == 1.0 and score(sample, "") == 0.0


@pytest.mark.parametrize("task", TASKS)
def test_seeds_repeat_and_differ(task: str) -> None:
    first = made(task)
    assert made(task) == first
    assert made(task, seed=1).checks != first.checks
    assert made(task, index=1).checks != first.checks


@pytest.mark.parametrize("group", ["grid", "rivals", "rivals-noise"])
@pytest.mark.parametrize("depth", [0, 25, 50, 75, 100])
def test_a_needle_lies_at_its_depth(group: str, depth: int) -> None:
    sample = made(f"{group}-{depth:03}", 4100)
    body = sample.context.split("\n", 1)[1]
    before, after = body.split(f"is: {sample.checks[0].text}.")
    assert len(before) / (len(before) + len(after)) == pytest.approx(depth / 100, abs=0.04)


@pytest.mark.parametrize("group", ["rivals", "rivals-noise"])
def test_rivals_lie_in_one_text_and_are_asked_for_one_by_one(group: str) -> None:
    samples = make_samples(f"{group}-050", 1500, 0, 0, Haystack(TEXT), PROMPTER.count)
    assert tuple(samples) == GROUPS[group]
    assert len({sample.context for sample in samples.values()}) == 1
    assert len({sample.question for sample in samples.values()}) == len(samples)
    assert all((NOISE in sample.context) == (group == "rivals-noise") for sample in samples.values())
    assert samples == make_samples(f"{group}-100", 1500, 0, 0, Haystack(TEXT), PROMPTER.count)


def test_a_pinned_system_prompt_is_that_of_the_same_chat() -> None:
    sample, pinned = made("instructions"), made("instructions-pinned")
    assert replace(pinned, pins_system=False) == sample and pinned.pins_system
    prompt = PROMPTER.prompt(pinned)
    start, end = prompt.pin
    assert list(prompt.context[start:end]) == words_of(pinned.history[0][1])
    assert PROMPTER.prompt(sample).pin == (0, 0)


@pytest.mark.parametrize(
    ("pin", "expected"), [((0, 0), []), ((3, 20), [(3, 20)]), ((0, 40), [(0, 35)]), ((10, 90), [(10, 41)])]
)
def test_as_much_is_pinned_as_fits(pin: tuple[int, int], expected: list[tuple[int, int]]) -> None:
    policy = policies.make("h2o", 50, n_sink=4, n_recent=15)
    found = pins_of(policy, Prompt((), (), 1, pin))
    assert found == expected
    check_pins(found, policy)
    if found and found[0][1] < pin[1]:
        with pytest.raises(BudgetError):
            check_pins([(found[0][0], found[0][1] + 1)], policy)


def test_units_are_hidden_at_depths() -> None:
    assert hide(["a", "b", "c", "d"], ["X", "Y", "Z"], [0, 0.5, 1]) == ["X", "a", "b", "Y", "c", "d", "Z"]


def test_the_haystacks_are_what_their_names_say() -> None:
    assert made("single-noise").context.count(NOISE) > 20
    prose = made("single-prose").context
    assert NOISE not in prose and prose.count("of the text.") > 50
    assert made("multikey").context.count("One of the special magic numbers for") > 40
    uuids = re.findall(
        r"is: ([0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12})\.",
        made("multikey-uuid").context,
    )
    assert len(uuids) == len(set(uuids)) > 15
    for index in range(20):
        assert all(re.fullmatch(r"[1-9]\d{6}", c.text) for c in made("multivalue", index=index).checks)


def test_a_key_is_asked_for_once_where_the_haystack_is_made_of_needles() -> None:
    for index in range(20):
        sample = made("multikey", index=index)
        key = re.search(r"number for (\S+) mentioned", sample.question)
        assert key and sample.context.count(f"numbers for {key[1]} is:") == 1


def test_a_chain_of_variables_can_be_followed() -> None:
    for index in range(20):
        sample = made("variables", index=index)
        value = re.search(r"the value (\d{5}) in", sample.question)
        lines = re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", sample.context, re.M)
        reached = [value[1]] if value else []
        for name, source in lines:  # in order: a name is set before it is used
            assert source == reached[-1]
            reached.append(name)
        assert reached[1:] == [check.text for check in sample.checks] and len(reached) == 6


def test_common_words_are_the_most_common_ones() -> None:
    for length, often, seldom in ((1500, 10, 1), (6000, 30, 3)):
        sample = made("common-words", length)
        counts = Counter(re.findall(r"\d+\. (\S+)", sample.context.split("\n", 1)[1])).most_common()
        assert {word for word, _ in counts[:10]} == {check.text for check in sample.checks}
        assert {n for _, n in counts[:10]} == {often} and {n for _, n in counts[10:]} == {seldom}


def test_frequent_words_follow_the_inverse_square() -> None:
    sample = made("frequent-words", 4100)
    counts = Counter(sample.context.split("frequently appeared coded words. ")[1].split()).most_common(5)
    assert counts[0][0] == "..." and [word for word, _ in counts[1:4]] == [c.text for c in sample.checks]
    for rank, (_, n) in enumerate(counts, 1):
        assert n == pytest.approx(counts[0][1] / rank**2, abs=1)


def test_the_log_leaves_the_stack_open_that_is_asked_for() -> None:
    for index in range(20):
        sample = made("stack", index=index)
        stack: list[str] = []
        for verb, name in re.findall(r"(Opened|Closed) the folder (\S+)\.", sample.context):
            if verb == "Opened":
                stack.append(name)
            else:
                assert stack.pop() == name
        assert stack == [check.text for check in sample.checks] and 3 <= len(stack) <= 5


def test_no_reply_of_the_chat_gives_the_rules_away() -> None:
    sample = made("instructions")
    replies = [text for role, text in sample.history if role == "assistant"]
    assert len(replies) > 20 and set(replies) == {"Noted."}
    first, name, code, last = (check.text for check in sample.checks)
    assert score(sample, f"{first}: the {name}, {code}. {last}.") == 1.0
    assert score(sample, f"{last} {name} {code} {first}") == 0.5
    assert not sample.can_stop_early


def test_scores_are_shares_and_ignore_case() -> None:
    sample = Sample("", "", "", (Check("Amber"), Check("OTTER"), Check("7"), Check("8")))
    assert score(sample, "it is AMBER, or an otter 7") == 0.75


@pytest.mark.parametrize("most", range(3, 40))
def test_fitting_finds_the_longest(most: int) -> None:
    def build(n: int) -> Sample:
        return Sample("x" * n, "", "", ())

    assert len(fit(build, lambda sample: len(sample.context) + 3, most).context) == most - 3
    with pytest.raises(OptionError, match=r"takes 3 tokens .* 2 were asked for"):
        fit(build, lambda sample: len(sample.context) + 3, 2)


def test_the_prompt_is_parted_where_the_question_begins() -> None:
    sample = Sample("alpha beta", "gamma?", "delta", (Check("e f"),), history=(("system", "s"),))
    prompt = PROMPTER.prompt(sample)
    assert prompt.context == tuple(words_of("<system> s <user> alpha beta"))
    assert prompt.question == tuple(words_of("gamma? <reply> delta"))
    assert prompt.n_answer == 16 + 2 * 2


def test_tasks_are_chosen_by_name_and_by_group() -> None:
    assert choose(["grid", "STACK", "grid-050"]) == (*GROUPS["grid"], "stack")
    with pytest.raises(OptionError, match=r"'mutlikey'.*'multikey'"):
        choose(["mutlikey"])


def test_own_english_is_there_without_a_file() -> None:
    sentences = Haystack(prose()).sentences(3000, random.Random(0).randrange(1 << 20))
    assert len(set(sentences)) > 1000


@pytest.mark.parametrize("length", [600, 3000])
def test_a_fact_is_told_in_the_second_turn_of_a_chat_and_asked_for_in_the_last(length: int) -> None:
    sample = made("chat-fact", length)
    assert [role for role, _ in sample.history] == ["user", "assistant"] * (len(sample.history) // 2)
    value = sample.checks[0].text
    assert [i for i, (_, text) in enumerate(sample.history) if value in text] == [2]
    key = re.search(r"the secret code for (\S+) that", sample.question)
    assert key and f"{key[1]} is: {value}" in sample.history[2][1]
    talk = [text for i, (_, text) in enumerate(sample.history) if i not in (2, 3)]
    assert len(set(talk)) == len(talk) and all(len(text.split()) < 20 for text in talk)
    assert not any(key[1] in text for text in talk)


def test_a_chat_of_2400_tokens_has_more_than_60_turns() -> None:
    assert len(made("chat-fact", 2400).history) > 2 * 60
