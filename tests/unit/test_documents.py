"""Documents are read a piece at a time, and what is no text in them is counted."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_gguf.documents import CHUNK_BYTES, Document


def read(data: bytes) -> tuple[str, int]:
    document = Document(io.BytesIO(data), "a.txt", len(data))
    return document.text(), document.n_replaced


@given(st.binary().filter(lambda data: b"\0" not in data and data[:2] not in (b"\xff\xfe", b"\xfe\xff")))
def test_the_text_is_what_python_makes_of_the_bytes(data: bytes) -> None:
    expected = data.decode("utf-8-sig", "replace").replace("\r\n", "\n").replace("\r", "\n")
    assert read(data)[0] == expected


@pytest.mark.parametrize(
    "data",
    [
        b"caf\xff",
        "café".encode()[:-1],  # cut off inside its last character
        b"a" * (CHUNK_BYTES - 1) + "é".encode()[:1],
        "\ufeffab".encode("utf-16-le")[:-1],
        "\ufeffab".encode("utf-16-be") + b"\xd8\x00",
    ],
)
def test_damage_is_counted_wherever_it_is_the_end_included(data: bytes) -> None:
    text, n_replaced = read(data)
    assert n_replaced == 1 and text.endswith("\ufffd")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_a_replacement_character_that_belongs_to_the_text_is_no_damage(encoding: str) -> None:
    text = "what \ufffd looks like"
    assert read(text.encode(encoding)) == (text, 0)


def test_characters_that_lie_across_two_reads_are_whole() -> None:
    text = "é" * CHUNK_BYTES
    assert read(b"a" + text.encode()) == ("a" + text, 0)
