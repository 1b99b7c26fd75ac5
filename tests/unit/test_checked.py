"""Arguments are checked by the annotations of their function, and what is wrong is said in words."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typing_extensions import TypedDict, Unpack

from h2o_gguf.checked import checked, kinds_of
from h2o_gguf.errors import OptionError
from h2o_gguf.kinds import (
    FLOAT32_MAX,
    Callback,
    Count,
    Int32,
    Integer,
    Number,
    Positive,
    Spans,
    Switch,
    Text,
    Texts,
    Tokens,
)
from h2o_gguf.kinds import Path as PathKind
from h2o_gguf.options import Bias, CacheType, Grammar, Message, Mirostat, Numa, Overrides, Processors

NAN, INF = float("nan"), float("inf")

KINDS: dict[str, tuple[Any, list[tuple[Any, Any]], list[Any]]] = {
    # the kind, values with what they become, values that are refused
    "Integer": (Integer, [(10**30, 10**30), (np.uint8(7), 7)], [True, 1.0, "1", None, NAN, np.float32(1)]),
    "Int32": (Int32, [(-(2**31), -(2**31)), (np.int64(5), 5)], [2**31, -(2**31) - 1, np.int64(2**31)]),
    "Count": (Count, [(0, 0)], [-1, np.int8(-1)]),
    "Positive": (Positive, [(1, 1)], [0]),
    "Mirostat": (Mirostat, [(2, 2)], [3, -1, "1"]),
    "Number": (
        Number,
        [(1, 1.0), (-0.5, -0.5), (np.float32(0.5), 0.5), (np.int16(3), 3.0), (FLOAT32_MAX, FLOAT32_MAX)],
        [NAN, INF, -INF, np.float32("nan"), 1e39, 10**400, "0.5", None, True],
    ),
    "Switch": (Switch, [(True, True), (0, False), (np.bool_(True), True)], ["no", None, 2, 1.0]),
    "Text": (Text, [("", ""), ("é\0", "é\0"), (np.str_("a"), "a")], [b"a", None, 5, "\ud800"]),
    "Texts": (Texts, [("a", "a"), (["a", "b"], ["a", "b"]), ({"a"}, ["a"]), ((), [])],
              [5, b"a", [b"a"], {"a": 1}, ["a", None], ["\ud800"]]),
    "Path": (PathKind, [("m.gguf", "m.gguf"), (Path("b"), "b")], [None, 5, b"m", "a\0b", "\ud800"]),
    "Tokens": (Tokens, [([1, np.int32(2)], [1, 2]), (np.arange(2), [0, 1]), (iter([5]), [5]), ((), [])],
               ["ab", b"ab", {1: 2}, [1.5], [True], ["a"], 5, np.zeros(2), np.array(5)]),
    "Spans": (Spans, [([(0, 40)], [(0, 40)]), (np.array([[1, 2]]), [(1, 2)]), ([], [])],
              [5, [5], [(1,)], [(1, 2, 3)], [("a", 2)], "system"]),
    "Callback": (Callback, [(len, len)], [5, "len"]),
    "Processors": (Processors, [(len, len), ([len], [len])], [5, [5], "len"]),
    "Bias": (
        Bias,
        [({5: 1, "7": np.float32(0.5)}, {5: 1.0, 7: 0.5}), ({5: -INF, 6: -1e300}, {5: -INF, 6: -INF})],
        [[1], {"x": 1}, {5: "1"}, {5: NAN}, {5: INF}, {5: 1e300}, {1.5: 1}, {True: 1}, {5: True}],
    ),
    "Grammar": (Grammar, [('root ::= "a"', 'root ::= "a"')], [5, b"root", "\ud800", ["root"]]),
    "CacheType": (CacheType, [("Q8_0", 8), (np.int32(1), 1)], ["q3_k", 99, True, None, [], 8.0]),
    "Numa": (Numa, [(True, 1), (4, 4)], [5, "x", None, -1]),
    "Overrides": (
        Overrides,
        [({"a": True, "b": 1, "c": 0.5, "d": "x" * 127}, {"a": True, "b": 1, "c": 0.5, "d": "x" * 127})],
        [5, {"a": None}, {"a": 2**63}, {"a": "x" * 128}, {"é" * 64: 1}, {5: 1}],
    ),
}  # fmt: skip


def taking(kind: Any) -> Any:
    def function(option: Any) -> Any:
        return option

    function.__annotations__["option"] = kind
    return checked(function)


@pytest.mark.parametrize(
    ("kind", "value", "becomes"),
    [(kind, *pair) for kind, allowed, _ in KINDS.values() for pair in allowed],
    ids=repr,
)
def test_what_is_allowed_arrives_as_plain_python(kind: Any, value: Any, becomes: Any) -> None:
    arrived = taking(kind)(value)
    assert arrived == becomes and type(arrived) is type(becomes)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, _, bad) in KINDS.items() for value in bad], ids=repr
)
def test_what_is_not_is_refused_with_name_value_and_what_it_can_be(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=r"^option is .*: it must be \w.+") as caught:
        taking(KINDS[name][0])(value)
    assert caught.value.options == ("option",)


@pytest.mark.parametrize("name", KINDS)
def test_none_is_refused_unless_it_is_written(name: str) -> None:
    kind = KINDS[name][0]
    with pytest.raises(OptionError, match=r"option is None: .*(?<!, or None)$"):
        taking(kind)(None)
    assert taking(kind | None)(None) is None
    with pytest.raises(OptionError, match=r", or None$"):
        taking(kind | None)(object())


class More(TypedDict, total=False):
    extra: Count


class Thing:
    @checked
    def method(self, first: Text, second: Number = 1.0, **more: Unpack[More]) -> dict[str, Any]:
        """What it does."""
        return {"first": first, "second": second, **more}


def test_defaults_positions_and_names_work_as_without_the_check() -> None:
    thing = Thing()
    assert thing.method("a") == {"first": "a", "second": 1.0}
    assert thing.method("a", 2, extra=np.uint8(3)) == {"first": "a", "second": 2.0, "extra": 3}
    assert thing.method.__doc__ == "What it does."
    assert [*inspect.signature(thing.method).parameters] == ["first", "second", "more"]
    assert [*kinds_of(Thing.method)] == ["first", "second", "extra"]


@pytest.mark.parametrize(
    ("args", "options", "words", "names"),
    [
        ((), {}, "method: missing a required argument: 'first'; it takes", ()),
        (("a", 1, 2), {}, "method: too many positional arguments", ()),
        (("a",), {"first": "b"}, "method: multiple values for argument 'first'", ()),
        (("a",), {"z": 1, "x": 2}, "unknown option z, x: method takes first, second, extra", ("z", "x")),
        ((5, "a"), {"extra": -1}, "first is 5: .*second is 'a': .*extra is -1", ("first", "second", "extra")),
    ],
)  # fmt: skip
def test_calls_that_do_not_fit_are_refused_with_every_name(
    args: tuple[Any, ...], options: dict[str, Any], words: str, names: tuple[str, ...]
) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        Thing().method(*args, **options)
    assert caught.value.options == names


def test_an_error_of_the_function_itself_is_not_touched() -> None:
    @checked
    def function(option: Text) -> None:
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        function("a")


def test_a_dataclass_checks_its_fields_whenever_it_is_made() -> None:
    @checked
    @dataclass(frozen=True)
    class Options:
        top_k: Int32 = 40

    assert Options(np.int64(3)) == Options(top_k=3)
    with pytest.raises(OptionError, match="top_k is 2"):
        replace(Options(), top_k=2**31)
    with pytest.raises(OptionError, match="unknown option k: Options takes top_k"):
        Options(k=1)  # type: ignore[call-arg]


def test_the_place_inside_a_value_is_named() -> None:
    take = taking(list[Message])
    assert take([{"role": "user", "name": "Bo"}]) == [{"role": "user", "name": "Bo"}]
    for messages, words in [
        ([{"role": "user"}, {}], r"option\[1\]\['role'\] is missing"),
        (
            [{"role": "user", "content": 5}],
            r"option\[0\]\['content'\] is 5: it must be valid text, None, or a",
        ),
    ]:
        with pytest.raises(OptionError, match=words):
            take(messages)


@pytest.mark.parametrize("value", [10**5000, "x" * 10**6, [[]] * 10**6], ids=["int", "str", "list"])
def test_a_huge_value_is_shown_in_short(value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        taking(Mirostat)(value)
    assert len(str(caught.value)) < 200


def test_a_value_that_cannot_be_shown_is_refused_all_the_same() -> None:
    class Shy(int):
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(OptionError, match="Shy"):
        taking(Mirostat)(Shy(5))
