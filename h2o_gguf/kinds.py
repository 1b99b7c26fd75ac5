"""Kinds of values: annotations that pydantic checks, each with the words of its error.

The words follow "it must be". Numbers are as wide as the C types they go into, since ctypes would cut off the
rest; numpy's numbers count as the Python numbers they stand for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BeforeValidator, GetCoreSchemaHandler, Strict
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

__all__ = [
    "FLOAT32_MAX",
    "FLOAT32_TINY",
    "KIND",
    "Callback",
    "Count",
    "Int32",
    "Integer",
    "Listed",
    "Made",
    "Must",
    "Number",
    "Path",
    "Positive",
    "Real",
    "Spans",
    "Switch",
    "Text",
    "Texts",
    "Tokens",
    "Whole",
    "scalar",
    "utf8",
]

KIND = "kind"  # the type of the errors below
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
FLOAT32_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Must:
    """Gives every mistake the same words."""

    be: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _in_words(handler(source), self.be)


@dataclass(frozen=True)
class Made:
    """What a function makes of the value; it raises ValueError for one it refuses."""

    by: Callable[[Any], Any]
    be: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _in_words(core_schema.no_info_plain_validator_function(self.by), self.be)


@dataclass(frozen=True)
class Whole:
    """A whole number.  low, high : its range, None for none.  note : what stands behind it in an error."""

    low: int | None = INT32_MIN
    high: int | None = INT32_MAX
    note: str = ""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        number = core_schema.int_schema(strict=True, ge=self.low, le=self.high)
        span = "" if self.low is None else f" from {self.low} to {self.high:,}"
        if (self.low, self.high) == (INT32_MIN, INT32_MAX):
            span = " of 32 bits"
        return _in_words(_from_numpy(number), f"a whole number{span}{self.note}")


@dataclass(frozen=True)
class Real:
    """A finite number, whole or not.  low : the least.  be : the words."""

    low: float = -FLOAT32_MAX
    be: str = "a finite number of 32 bits"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        number = core_schema.float_schema(strict=True, ge=self.low, le=FLOAT32_MAX, allow_inf_nan=False)
        return _in_words(_from_numpy(number), self.be)


def _in_words(schema: CoreSchema, words: str) -> CoreSchema:
    return core_schema.custom_error_schema(schema, custom_error_type=KIND, custom_error_message=words)


def _from_numpy(schema: CoreSchema) -> CoreSchema:
    return core_schema.no_info_before_validator_function(scalar, schema)


def scalar(value: Any) -> Any:
    """The Python number behind a number of numpy's; anything else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def utf8(text: str) -> str:
    """The text.  Raises: UnicodeEncodeError, a ValueError, UTF-8 has no bytes for it."""
    text.encode()
    return text


def _listed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | Mapping):
        raise PydanticCustomError(KIND, "a list")
    return list(value)


def _switch(value: Any) -> Any:
    value = scalar(value)
    return bool(value) if type(value) is int and value in (0, 1) else value


def _path(value: Any) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or "\0" in text:
        raise ValueError
    os.fsencode(text)  # which has bytes for names on disk that are no UTF-8
    return text


Listed = BeforeValidator(_listed)  # arrays, sets and iterators are lists; texts, bytes and mappings are not

Integer = Annotated[int, Whole(None, None)]
Int32 = Annotated[int, Whole()]
Count = Annotated[int, Whole(0)]
Positive = Annotated[int, Whole(1)]
Number = Annotated[float, Real()]
Switch = Annotated[bool, Strict(), BeforeValidator(_switch), Must("True or False")]
Text = Annotated[str, Strict(), AfterValidator(utf8), Must("valid text")]
Texts = Annotated[Text | Annotated[Sequence[Text], Listed], Must("a text or a list of texts")]
Path = Annotated[str | os.PathLike[str], Made(_path, "a path in valid text")]
Tokens = Annotated[Sequence[Integer], Listed, Must("a list of tokens")]
Spans = Annotated[
    Sequence[tuple[Integer, Integer]], Listed, Must("a list of spans of positions, such as [(0, 40)]")
]
Callback = Annotated[Callable[..., Any], Must("a function")]
