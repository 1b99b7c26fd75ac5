"""The stop that begins earliest in the text wins, however the text arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from h2o_gguf.stops import StopScanner


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], StopScanner]:
    scanner = StopScanner(stops)
    shown = []
    for piece in pieces:
        shown.append(scanner.push(piece))
        if scanner.stopped:
            break
    shown.append(scanner.finish())
    return shown, scanner


def earliest(text: str, stops: list[str]) -> str:
    """The definition: everything before the first position where some stop begins."""
    starts = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(starts)] if starts else text


SMALL = st.text("ab", max_size=20)
STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(st.lists(st.text("ab", max_size=4), max_size=12), STOPS)
def test_what_is_shown_is_the_text_before_the_earliest_stop(pieces: list[str], stops: list[str]) -> None:
    shown, _ = run(pieces, stops)
    assert "".join(shown) == earliest("".join(pieces), stops)


@given(SMALL, STOPS)
def test_the_way_a_text_is_cut_makes_no_difference(text: str, stops: list[str]) -> None:
    at_once, _ = run([text], stops)
    by_character, _ = run(list(text), stops)
    assert "".join(at_once) == "".join(by_character)


def test_a_stop_split_over_pieces_is_swallowed() -> None:
    shown, scanner = run(["Hello", " <", "|end", "|> more"], ["<|end|>"])
    assert "".join(shown) == "Hello "
    assert scanner.stop == "<|end|>"


def test_held_text_is_released_when_the_stop_does_not_complete() -> None:
    scanner = StopScanner(["<|end|>"])
    assert scanner.push("a <|e") == "a "
    assert scanner.held == "<|e"
    assert scanner.push("arth|>") == "<|earth|>"
    assert not scanner.stopped


def test_held_text_is_released_when_the_text_ends() -> None:
    shown, scanner = run(["wait for EN"], ["END"])
    assert shown == ["wait for ", "EN"]
    assert not scanner.stopped


def test_the_earliest_in_the_text_wins_and_not_the_first_in_the_list() -> None:
    shown, scanner = run(["one two three"], ["three", "two"])
    assert ("".join(shown), scanner.stop) == ("one ", "two")


def test_a_stop_that_begins_earlier_but_ends_later_wins() -> None:
    assert "".join(run(list("xabcdy"), ["bc", "abcd"])[0]) == "x"
    assert "".join(run(list("xabcey"), ["bc", "abcd"])[0]) == "xa"


def test_nothing_is_shown_after_a_stop() -> None:
    scanner = StopScanner(["."])
    assert scanner.push("a.b") == "a"
    assert scanner.push("c") == "" and scanner.finish() == ""


def test_empty_stops_are_no_stops() -> None:
    assert "".join(run(["abc"], ["", ""])[0]) == "abc"
