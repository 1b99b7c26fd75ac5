"""JSON schemas no grammar should be made of are refused; others pass as they are."""

from __future__ import annotations

from typing import Any

import pytest

from h2o_gguf.schemas import MAX_COUNT, MAX_LEVELS, check_schema

LOOP: dict[str, Any] = {}
LOOP["items"] = LOOP


def objects(n: int) -> dict[str, Any]:
    """n objects, each a property of the one around it."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def shared(n: int) -> dict[str, Any]:
    """Each level holds the one below twice, so that there are 2**n paths."""
    schema: dict[str, Any] = {}
    for _ in range(n):
        schema = {"anyOf": [schema, schema]}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "string", "minLength": 2, "maxLength": 2},
        {"type": "array", "items": {}, "maxItems": 1000, "minItems": 0},
        {"type": "string", "minLength": MAX_COUNT},
        {"type": "string", "pattern": r"^\d{2,4}-[\]{9,1}]\}\{5,2\}(a|b){3}$"},
        {"pattern": "^{" + " " * 9000},
        {"pattern": "[" * 100_000},
        {"properties": {"minLength": {"type": "integer"}, "maxLength": {"type": "integer"}}},
        {"enum": [1, 1.5, None, True, "a"], "$defs": {"a": {"const": ()}}},
        objects((MAX_LEVELS - 1) // 2),
    ],
)
def test_a_sane_schema_passes_as_it_is(schema: dict[str, Any]) -> None:
    assert check_schema(schema) is schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"minLength": 5, "maxLength": 2}, "minLength and maxLength at # are 5 and 2"),
        ({"properties": {"a": {"minItems": 5, "maxItems": 2}}}, "at #/properties/a are 5 and 2"),
        ({"maxLength": 1001}, "may differ by at most 1000"),
        ({"minItems": 10**9}, "minItems at # is 1000000000: it must be a whole number from 0 to 10000"),
        ({"maxLength": -1}, "maxLength at # is -1"),
        ({"maxLength": 5.0}, "maxLength at # is 5.0"),
        ({"maxLength": True}, "maxLength at # is True"),
        ({"pattern": "^a{5,2}$"}, "the pattern at # are 5 and 2"),
        ({"pattern": "^a{99999999999}$"}, "repeats more than 10000 times"),
        ({"pattern": "^a{,99999}$"}, "repeats more than 10000 times"),
        ({"pattern": "^b{+1}$"}, "closes a bracket it did not open"),
        ({"pattern": "^a]$"}, "closes a bracket it did not open"),
        ({"pattern": "^}$"}, "closes a bracket it did not open"),
        (objects(MAX_LEVELS), "nested more than 400 levels"),
        (LOOP, "nested more than 400 levels"),
        (shared(40), "more than 100000 values"),
        ({"enum": [b"a"]}, "#/enum/0 of the schema is of <class 'bytes'>, which is no JSON"),
        ({5: {}}, "the key 5"),
    ],
)  # fmt: skip
def test_what_no_grammar_can_be_made_of_is_refused_with_its_place(schema: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_schema(schema)
