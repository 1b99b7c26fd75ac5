"""The tokens of a prompt: BOS once, fill-in-the-middle, and where a text lies in it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("h2o_gguf.bindings", reason="needs the installed package")
from h2o_gguf.errors import LibraryError, OptionError

try:
    from h2o_gguf.prompt import completion_tokens, find_text, one_bos
except LibraryError as error:
    pytest.skip(str(error), allow_module_level=True)

BOS, EOS, PRE, SUF, MID, END = 1, 2, 3, 4, 5, 6
NAMES = {BOS: b"<s>", EOS: b"</s>", END: b"<end>"}


class Vocab(SimpleNamespace):
    """Letters are tokens of their own code; 1 to 6 are control tokens; 300 spells "ab"."""

    def piece(self, token: int, special: bool = False) -> bytes:
        if token < 10:
            return NAMES.get(token, b"") if special else b""
        return b"ab" if token == 300 else bytes([token])

    def is_control(self, token: int) -> bool:
        return token < 10

    def is_end(self, token: int) -> bool:
        return token in (EOS, END)


def vocab(**facts: Any) -> Any:
    defaults = {"bos": BOS, "eos": EOS, "adds_bos": True, "adds_eos": False}
    return Vocab(**{**defaults, "fim_prefix": -1, "fim_suffix": -1, "fim_middle": -1, **facts})


def tokenize(text: bytes, add_bos: bool, special: bool) -> list[int]:
    head = [BOS] if add_bos else []
    while special and text.startswith(b"<s>"):
        head, text = [*head, BOS], text[3:]
    return [*head, *text]


def complete(prompt: Any, suffix: str | None = None, **facts: Any) -> list[int]:
    return completion_tokens(prompt, suffix, vocab(**facts), tokenize)


def test_bos_is_added_once() -> None:
    assert complete("ab") == [BOS, 97, 98]
    assert complete("<s>ab") == complete("<s><s>ab") == [BOS, 97, 98]
    assert one_bos([BOS, BOS, 97], vocab()) == one_bos([97], vocab()) == [BOS, 97]


def test_a_model_that_wants_no_bos_gets_none() -> None:
    assert complete("ab", adds_bos=False) == [97, 98]
    assert one_bos([97], vocab(adds_bos=False)) == [97]
    assert one_bos([BOS, BOS], vocab(adds_bos=False)) == [BOS, BOS], "there it is an ordinary token"


def test_tokens_are_taken_as_they_are() -> None:
    assert complete([97, 98]) == [97, 98]


def test_an_empty_prompt_is_what_a_text_begins_with() -> None:
    assert complete("") == complete([]) == [BOS]
    assert complete("", bos=-1, adds_bos=False) == [EOS]
    with pytest.raises(OptionError):
        complete("", bos=-1, eos=-1, adds_bos=False)


def test_a_gap_is_filled_between_its_marks() -> None:
    fim = {"fim_prefix": PRE, "fim_suffix": SUF, "fim_middle": MID}
    assert complete("a", "b", **fim) == [BOS, PRE, 97, SUF, 98, MID]
    assert complete("a", "", adds_bos=False, **fim) == [PRE, 97, SUF, MID]
    swapped = completion_tokens("a", "b", vocab(adds_bos=False, **fim), tokenize, suffix_first=True)
    assert swapped == [SUF, 98, PRE, 97, MID]
    assert complete("<s>a", "b", adds_bos=False, **fim)[1:5] == list(b"<s>a"), "names are text inside a file"


def test_a_suffix_changes_no_prompt_of_a_model_without_infill() -> None:
    assert complete("a", "b") == [BOS, 97]


def test_a_text_is_found_with_the_control_tokens_behind_it() -> None:
    tokens = [BOS, *b"system ", *b"Be good.", END, *b"\nuser Be good.", END]
    start, end = find_text(tokens, "  Be good.\n", vocab()) or (0, 0)
    assert tokens[start:end] == [*b"Be good.", END]


def test_a_token_that_spells_only_a_part_of_the_text_is_included() -> None:
    assert find_text([120, 300, 99, 100], "bc", vocab()) == (1, 3)


@pytest.mark.parametrize("text", ["never", "", "   "])
def test_a_text_that_is_not_there_is_not_found(text: str) -> None:
    assert find_text([97, 98, 99], text, vocab()) is None
