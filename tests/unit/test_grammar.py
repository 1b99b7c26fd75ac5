"""Grammars that llama.cpp's parser would hang or crash on are refused; others pass."""

from __future__ import annotations

import time

import pytest

from h2o_gguf.errors import OptionError
from h2o_gguf.grammar import MAX_DEPTH, MAX_TIMES, check_grammar


def nested(n: int) -> str:
    return "root ::= " + "(" * n + '"a"' + ")" * n


def optional(n: int) -> str:
    """At most n characters, as schemas write it."""
    return 'c ::= "a"\nroot ::= ' + "(c " * n + ")?" * n


def layers(n: int, rule: str) -> str:
    """Rules that begin with the next one; rule : with {} for it."""
    lines = [f"r{i} ::= " + rule.replace("{}", f"r{i + 1}") for i in range(n)]
    return "\n".join(["root ::= r0", *lines, f'r{n} ::= "x"'])


LEGAL = [
    'root ::= "a"',
    'root ::= "yes" | "no" # a comment (((',
    'root ::= "\\"(" [^"\\]({5,2}] . "a"{2,5} "b"{3} "c"{2,} "d"+?',
    'root ::= ("a"*)*',
    "root ::= (ws item?)*\nitem ::= [0-9]+\nws ::= [ \\t]*",
    'root ::= x root | "b"\nx ::= y\ny ::= "c" | ""',
    f'root ::= "a"{{0,{MAX_TIMES}}} [0-9a-f]{{{MAX_TIMES}}}',
    'root ::= "a"{ 2 , # up to\n 5 }',
    nested(MAX_DEPTH),
    optional(MAX_DEPTH),
    layers(500, "{}"),
    layers(10, '{} "a" | {} "b"'),
    "root ::= " + " | ".join(f'"word{i}"' for i in range(10_000)),
    'root ::= "a" ' + "#" * 10_000,
    'root ::= "a" ' + " #\n" * 10_000 + '| "b',
    "",
]
REFUSED = [
    ('root ::= "a"{5,2}', r"\{5,2\} ends below its start"),
    ('root ::= ("b" ("a"{ 5 , # not\n 2 }))', "ends below its start"),
    (f'root ::= "a"{{{MAX_TIMES + 1}}}', "at most 2000"),
    ('root ::= "a"{0,99999999999999999999999}', "at most 2000"),
    ('root ::= "a"{0000000000099,2}', "ends below its start"),
    ('root ::= "' + "a" * 10_000 + '"{2000}', "more than 1000000 characters"),
    (nested(MAX_DEPTH + 1), "nested more than 1000 deep"),
    (nested(200_000), "nested more than 1000 deep"),
    ('root ::= root "a" | "b"', "rule 'root' can begin with itself"),
    ('root ::= e*\ne ::= "a" | ""', "left recursion"),
    ('root ::= x root "z" | "b"\nx ::= y\ny ::= "c" | ""', "rule 'root' can begin in too many ways"),
    (layers(30, "{} | {}"), "too many ways"),
    (layers(40, '{} "a" | {} "b"'), "too many ways"),
    (layers(100_000, "{}"), "too many ways"),
    ("root ::= " + "e{0,2000} " * 3 + '\ne ::= "" | "a"', "too many ways"),
    ('root ::= "a\0"', "NUL character at 11"),
]  # fmt: skip


@pytest.mark.parametrize("text", LEGAL, ids=lambda text: text[:40])
def test_a_sane_grammar_passes(text: str) -> None:
    check_grammar(text)


@pytest.mark.parametrize(("text", "words"), REFUSED, ids=lambda text: text[:40])
def test_what_would_hang_or_crash_the_parser_is_refused_in_words_and_soon(text: str, words: str) -> None:
    start_s = time.monotonic()
    with pytest.raises(OptionError, match=words) as caught:
        check_grammar(text)
    assert caught.value.options == ("grammar",) and len(str(caught.value)) < 300
    assert time.monotonic() - start_s < 30


@pytest.mark.parametrize(
    "text",
    ["root ::= (", 'root ::= "a', "root ::= *", "root ::= )", "root", "root ::= foo", "root ::= ]{5,2}"],
)
def test_what_is_merely_wrong_is_left_to_llama_cpps_own_words(text: str) -> None:
    check_grammar(text)
