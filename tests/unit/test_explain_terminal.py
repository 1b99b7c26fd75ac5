"""An explanation in a terminal."""

from __future__ import annotations

import io
import re

import pytest
from explain_fakes import explanation, gaps_of
from rich.console import Console

from h2o_gguf.cli.why import N_LINES, show
from h2o_gguf.explain import Explanation

WORDS = [f" w{i}" + ("\n" if i % 10 == 9 else "") for i in range(100)]


def shown(e: Explanation, *, is_terminal: bool = False) -> list[str]:
    file = io.StringIO()
    colours = "truecolor" if is_terminal else None
    console = Console(file=file, width=200, highlight=False, force_terminal=is_terminal, color_system=colours)
    show(e, console)
    return file.getvalue().split("\n")


def test_each_line_begins_with_the_share_that_is_held() -> None:
    e = explanation(WORDS)
    for i, line in enumerate(shown(e)[1:11]):
        tokens = range(10 * i, min(10 * i + 10, e.n_past))
        share = sum(int(e.held()[t]) for t in tokens) / len(tokens) / 6
        assert int(line[:3]) == pytest.approx(100 * share, abs=0.51)
        assert line[3:] == "% " + "".join(WORDS[10 * i : 10 * i + 10]).rstrip("\n")


def test_lists_name_the_strongest_entries_first() -> None:
    e = explanation(WORDS)
    text = "\n".join(shown(e))
    assert e.missed is not None
    kept, missed = text.split("kept entries")[1].split("evicted entries")
    for part, shares in ((kept, e.kept.mean(0)), (missed, e.missed.mean(0))):
        found = re.findall(r"^ *([\d.]+)% +(\d+) ", part, re.MULTILINE)
        wanted = sorted(range(e.n_past), key=lambda p: -shares[p])[:10]
        assert [int(p) for _, p in found] == wanted
        assert [float(s) for s, _ in found] == pytest.approx(
            [100 * float(shares[p]) for p in wanted], abs=0.006
        )
    assert "20.0% of its attention in all" in missed  # the fake's missed shares sum to a fifth


def test_recalled_entries_are_listed_with_their_share_and_italic() -> None:
    e = explanation(WORDS, gaps=gaps_of(explanation(WORDS).left))
    counts = e.recalled()
    lines = shown(e)
    at = next(i for i, line in enumerate(lines) if "evicted and fetched back" in line)
    found = [re.findall(r"[\d.]+", line)[:2] for line in lines[at + 1 : at + 11]]
    wanted = sorted(range(e.n_past), key=lambda p: -counts[p])[:10]
    assert found == [[f"{100 * counts[p] / 6:.2f}", f"{p}"] for p in wanted]
    inked = "\n".join(shown(e, is_terminal=True)).split("evicted and fetched back")[0]
    for p in range(e.n_past):
        style = re.findall(rf"\x1b\[([\d;]*)m w{p}\b", inked)[0].split(";")
        assert ("3" in style[:3]) == (counts[p] >= 1)
    assert "fetched back" not in "".join(shown(explanation(WORDS)))


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_text_cannot_steer_the_terminal(is_terminal: bool) -> None:
    nasty = ["\x1b[31m", "\x07", "\x9b2J", "\r", "\u202e", "[bold]", "\x7f", "a\tb"] * 10
    text = "\n".join(shown(explanation(nasty), is_terminal=is_terminal))
    assert "[bold]" in text and "␛[31m" in text and "␇" in text
    ours = re.sub(r"\x1b\[[\d;]*m", "", text)
    assert bool(len(ours) < len(text)) == is_terminal  # colours, and only in a terminal
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", ours)


def test_a_newline_within_a_token_ends_the_line() -> None:
    lines = shown(explanation(["one", "\n  ", "two", "\n\n", "three", " four"], n_answer=1))
    assert [line[5:] for line in lines[1:5]] == ["one", "  two", "", "three four"]


def test_the_middle_of_a_long_text_is_left_out_with_its_share() -> None:
    e = explanation([f"line {i}\n" for i in range(400)])
    lines = shown(e)
    assert lines[1 + N_LINES].endswith(f"... {401 - 2 * N_LINES} lines ...")
    hidden = e.held()[N_LINES : 401 - N_LINES] / 6
    assert lines[1 + N_LINES].startswith(f"{hidden.mean():4.0%} ")


def test_what_is_not_known_is_said() -> None:
    text = "\n".join(shown(explanation(WORDS, missed=None, why_not_missed="there is no room")))
    assert "what a full cache would have used is not known: there is no room" in text
