"""Bytes of tokens become text without half characters."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from h2o_gguf.benchmark.machine import environment
from h2o_gguf.text import Utf8Stream, readable


def cut(data: bytes, borders: list[int]) -> list[bytes]:
    ends = sorted({min(b, len(data)) for b in borders} | {0, len(data)})
    return [data[a:b] for a, b in itertools.pairwise(ends)]


@given(st.text(), st.lists(st.integers(0, 200)))
def test_joined_pieces_equal_the_text_however_it_is_cut(text: str, borders: list[int]) -> None:
    stream = Utf8Stream()
    assert "".join(stream.push(piece) for piece in cut(text.encode(), borders)) == text
    assert stream.held == b""


@given(st.binary(), st.lists(st.integers(0, 200)))
def test_broken_bytes_give_the_same_text_however_they_are_cut(data: bytes, borders: list[int]) -> None:
    at_once, in_pieces = Utf8Stream(), Utf8Stream()
    whole = at_once.push(data)
    assert "".join(in_pieces.push(piece) for piece in cut(data, borders)) == whole
    assert in_pieces.held == at_once.held


def test_an_emoji_appears_with_its_last_byte() -> None:
    stream = Utf8Stream()
    assert [stream.push(bytes([b])) for b in "🌟".encode()] == ["", "", "", "🌟"]


def test_a_character_cut_off_at_the_end_is_held_and_never_shown() -> None:
    stream = Utf8Stream()
    assert stream.push("好".encode()[:2]) == ""
    assert stream.held == "好".encode()[:2]


def test_a_byte_that_can_never_become_text_turns_into_the_replacement_character() -> None:
    assert Utf8Stream().push(b"a\xffb") == "a\ufffdb"


def test_a_file_name_that_is_no_utf8_can_be_written() -> None:
    assert readable(os.fsdecode(b"caf\xc3\xa9 \xff.gguf")).encode().decode() == "café \ufffd.gguf"


def test_a_model_with_such_a_name_is_described(tmp_path: Path) -> None:
    model = tmp_path / os.fsdecode(b"\xff.gguf")
    model.touch()
    assert environment(model)["model"] == "\ufffd.gguf"
