"""Reads a GGUF file's metadata and tensor list, and nothing of its weights.

The `gguf` package's own reader builds numpy views of every vocabulary entry, which takes ten seconds for a
large vocabulary and has no bounds checks; this one steps over long arrays and checks each step, so that a
broken file is refused here, in words, before native code sees it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from h2o_gguf.errors import ModelFileError
from h2o_gguf.models.architectures import ARCHITECTURES

__all__ = ["Header", "LongArray", "TensorInfo", "read_header"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Arrays longer than this (vocabulary, scores, merges) are counted, not decoded.
LONGEST_ARRAY = 4096
MAX_DIMS = 4
LARGEST = (1 << 31) - 1  # llama.cpp's sizes are 32 bits wide, its positions and layers signed

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(frozen=True)
class LongArray:
    """Stands for an array that was stepped over.  n : its number of elements."""

    n: int

    def __len__(self) -> int:
        return self.n


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: name, shape in ggml's order, type name, offset from the file's start, bytes (0 unknown)."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class Header:
    """A GGUF file's metadata and tensor infos.

    path : the file. version : of the format. n_file_bytes : its size. metadata : key to value; arrays are
    tuples, long ones LongArray. tensors : by name.
    """

    path: Path
    version: int
    n_file_bytes: int
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `<architecture>.<key>`, or the default."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int | None = None, *, low: int = 0, high: int = LARGEST) -> int:
        """The whole number `<architecture>.<key>`, or the default.

        Raises ModelFileError: it is missing without a default, no number, or not within low .. high.
        """
        value = self.get(key, default)
        if value is None:
            raise ModelFileError(self.path, f"its metadata lacks {self.architecture}.{key}")
        return self.checked(f"{self.architecture}.{key}", value, low=low, high=high)

    def checked(self, name: str, value: Any, *, low: int = 0, high: int = LARGEST) -> int:
        """The value as a whole number.  Raises ModelFileError: it is none, or not within low .. high."""
        if not isinstance(value, (bool, int, float)):
            raise ModelFileError(self.path, f"{name} is not a number: the file is damaged")
        if not low <= value <= high:  # not so for NaN either
            raise ModelFileError(
                self.path, f"{name} is {value}; {low:,} to {high:,} are legal: the file is damaged"
            )
        return int(value)


class _Cursor:
    """Steps through the header; every step is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at, self.end = data, path, 0, len(data)

    def fail(self, reason: str) -> ModelFileError:
        return ModelFileError(self.path, reason)

    def skip(self, n: int) -> int:
        start = self.at
        if n > self.end - start:
            raise self.fail(
                f"the file ends inside its header, at byte {self.end}: it is cut off; fetch it again"
            )
        self.at = start + n
        return start

    def scalar(self, code: str) -> Any:
        form = "<" + code
        return struct.unpack_from(form, self.data, self.skip(struct.calcsize(form)))[0]

    def count(self, what: str, smallest: int) -> int:
        n = int(self.scalar("Q"))
        if n * smallest > self.end - self.at:
            raise self.fail(f"its header claims {n} {what}, more than fit in {self.end} bytes: it is damaged")
        return n

    def raw(self) -> bytes:
        n = int(self.scalar("Q"))
        start = self.skip(n)
        return self.data[start : start + n]

    def text(self) -> str:
        return self.raw().decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self.array()
        return self.scalar(self.code(kind))

    def code(self, kind: int) -> str:
        try:
            return _SCALARS[kind]
        except KeyError:
            raise self.fail(f"its header holds a value of unknown type {kind}: it is damaged") from None

    def array(self) -> tuple[Any, ...] | LongArray:
        kind = int(self.scalar("I"))
        if kind == _STRING:
            n = self.count("strings in one array", 8)
            if n <= LONGEST_ARRAY:
                return tuple(self.text() for _ in range(n))
            self.skip_strings(n)
            return LongArray(n)
        code = self.code(kind)
        size = struct.calcsize("<" + code)
        n = self.count("values in one array", size)
        start = self.skip(n * size)
        if n > LONGEST_ARRAY:
            return LongArray(n)
        return struct.unpack_from(f"<{n}{code}", self.data, start)

    def skip_strings(self, n: int) -> None:
        unpack, data, at, last = struct.Struct("<Q").unpack_from, self.data, self.at, self.end - 8
        for _ in range(n):
            if at > last:
                break
            at += 8 + unpack(data, at)[0]
        self.at = min(at, self.end)
        if at > self.end or at > last + 8:
            self.skip(self.end)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read the header of one GGUF file, without its weights.

    Raises ModelFileError: missing, a folder, unreadable, empty, too short, no GGUF, cut off, damaged, or of
    an architecture the runtime does not know.
    """
    where = Path(path)
    try:
        if where.is_dir():
            raise ModelFileError(where, "it is a folder; name the .gguf file inside it")
        if not where.exists():
            raise ModelFileError(where, "there is no such file")
        if not where.is_file():
            raise ModelFileError(where, "it is not a regular file")
        with where.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ModelFileError(where, "the file is empty; fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Cursor(data, where), size)
    except OSError as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(where, error.strerror or str(error)) from error


def _parse(cursor: _Cursor, size: int) -> Header:
    magic = cursor.data[:4]
    if not MAGIC.startswith(magic):
        raise cursor.fail(f"it is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}")
    if size < 24:
        raise cursor.fail(f"it has {size} bytes, a GGUF header at least 24: it is cut off; fetch it again")
    cursor.skip(4)
    version = int(cursor.scalar("I"))
    if version & 0xFFFF == 0:
        raise cursor.fail("it was written for a big-endian machine; convert it anew")
    if version not in VERSIONS:
        raise cursor.fail(f"its GGUF version is {version}, known are {' and '.join(map(str, VERSIONS))}")
    # The smallest entries: a tensor info has 24 bytes besides its dimensions, a key-value pair 13.
    n_tensors = cursor.count("tensors", 24)
    n_kv = cursor.count("metadata entries", 13)
    metadata: dict[str, Any] = {}
    for _ in range(n_kv):
        key = cursor.text()
        metadata[key] = cursor.value(int(cursor.scalar("I")))
    _check_architecture(cursor, metadata)
    infos = [_tensor(cursor) for _ in range(n_tensors)]
    start = _data_start(cursor, metadata)
    tensors = {
        name: TensorInfo(name, shape, kind, start + offset, n) for name, shape, kind, offset, n in infos
    }
    _check_end(cursor, tensors, size)
    return Header(cursor.path, version, size, metadata, tensors)


def _check_architecture(cursor: _Cursor, metadata: Mapping[str, Any]) -> None:
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise cursor.fail("its metadata names no architecture (general.architecture)")
    if name == "clip":
        raise cursor.fail("it holds a vision or audio projector ('clip'), not a language model")
    if name not in ARCHITECTURES:
        raise cursor.fail(f"unknown architecture {name!r}: the runtime knows {len(ARCHITECTURES)} others")


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], str, int, int]:
    name = cursor.text()
    n_dims = int(cursor.scalar("I"))
    if n_dims > MAX_DIMS:
        raise cursor.fail(f"tensor {name!r} has {n_dims} dimensions, at most {MAX_DIMS} are legal")
    shape = tuple(int(cursor.scalar("Q")) for _ in range(n_dims))
    kind = int(cursor.scalar("I"))
    offset = int(cursor.scalar("Q"))
    try:
        known = GGMLQuantizationType(kind)
    except ValueError:  # newer than the gguf package: the runtime may know it, so its end goes unchecked
        return name, shape, f"type {kind}", offset, 0
    block, size = GGML_QUANT_SIZES[known]
    n = 1
    for dim in shape:
        n *= dim
    if n % block:
        raise cursor.fail(f"tensor {name!r} of type {known.name} has {n} values, not a multiple of {block}")
    return name, shape, known.name, offset, n // block * size


def _data_start(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align <= 0 or align & (align - 1):
        raise cursor.fail(f"its alignment is {align!r}, not a power of two: it is damaged")
    return -(-cursor.at // align) * align


def _check_end(cursor: _Cursor, tensors: Mapping[str, TensorInfo], size: int) -> None:
    if not tensors:
        return
    last = max(tensors.values(), key=lambda tensor: tensor.offset + tensor.n_bytes)
    needed = last.offset + last.n_bytes
    if needed > size:
        raise cursor.fail(
            f"it has {size} bytes, its tensors need {needed} (tensor {last.name!r} is not within the file): "
            "it is cut off; fetch it again"
        )
