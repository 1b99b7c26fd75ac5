"""Refuses JSON schemas that llama-cpp-python could not turn into a grammar in any sane time and memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from h2o_gguf.grammar import MAX_DEPTH

__all__ = ["check_schema"]

MAX_LEVELS = 400  # two for each object in another
MAX_VALUES = 100_000
MAX_COUNT = 10_000  # of characters or items, each of which is written out
COUNTS = (("minLength", "maxLength"), ("minItems", "maxItems"))
REPETITION = re.compile(r"\{([0-9 ]*)(?:(,)([0-9 ]*))?\}")
ESCAPED = re.compile(r"\\.|\[(?:\\.|[^\]\\])*(?:\]|\Z)", re.DOTALL)  # where brackets mean themselves


def check_schema(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema.

    Raises: ValueError, it is no JSON, too deep, too large, or repeats something too often or less than
        not at all.
    """
    todo: list[tuple[str, Any, int]] = [("#", schema, 1)]
    n_values = 0
    while todo:
        place, value, level = todo.pop()
        n_values += 1
        if level > MAX_LEVELS:
            raise ValueError(f"the schema is nested more than {MAX_LEVELS} levels deep: use a flatter one")
        if n_values > MAX_VALUES:
            raise ValueError(f"the schema has more than {MAX_VALUES} values: use a smaller one")
        items: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, dict):
            _check_object(place, value)
            items = value.items()
        elif isinstance(value, list | tuple):
            items = enumerate(value)
        elif value is not None and not isinstance(value, str | int | float):
            raise ValueError(f"{place} of the schema is of {type(value)}, which is no JSON")
        todo += [(f"{place}/{key}", part, level + 1) for key, part in items]
    return schema


def _check_object(place: str, value: Mapping[str, Any]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"{place} of the schema has the key {key!r}: keys of JSON are texts")
    for low, high in COUNTS:
        span = _count(place, low, value.get(low)) or 0, _count(place, high, value.get(high))
        _check_span(f"{low} and {high} at {place}", *span)
    if isinstance(value.get("pattern"), str):
        _check_pattern(f"the pattern at {place}", value["pattern"])


def _count(place: str, name: str, value: Any) -> int | None:
    if not isinstance(value, int | float):  # absent; or a property has this name, and its schema is here
        return None
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise ValueError(f"{name} at {place} is {value}: it must be a whole number from 0 to {MAX_COUNT}")
    return value


def _check_span(what: str, low: int, high: int | None) -> None:
    if high is not None and high < low:
        raise ValueError(f"{what} are {low} and {high}: the first must not be more than the second")
    if high is not None and high - low > MAX_DEPTH:
        raise ValueError(f"{what} are {low} and {high}: they may differ by at most {MAX_DEPTH}")


def _check_pattern(what: str, pattern: str) -> None:
    bare = ESCAPED.sub("", pattern)
    for texts in REPETITION.findall(bare):
        low, comma, high = (text.replace(" ", "") for text in texts)
        if max(len(low), len(high)) > len(str(MAX_COUNT)) or max(int(low or 0), int(high or 0)) > MAX_COUNT:
            raise ValueError(f"{what} repeats more than {MAX_COUNT} times")
        if comma and high:
            _check_span(f"the numbers of a repetition in {what}", int(low or 0), int(high))
    if set("]}") & set(REPETITION.sub("", bare)):  # llama-cpp-python waits for ever for what they close
        raise ValueError(f"{what} closes a bracket it did not open: write a backslash before it")
