"""Saved sessions as files: everything a sequence needs to go on in another process."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import StateFileError
from h2o_gguf.pins import Span
from h2o_gguf.saved_traces import SavedTraces, pack, unpack

__all__ = ["IMAGE", "SHARED_BY", "Session", "unreadable"]

MAGIC = b"H2OGSES"
FORMAT = 3
HEAD = struct.Struct("<7sBQ32s")  # magic, format, bytes of the whole file, sha256 of what follows
SIZE = struct.Struct("<Q")  # before each part
N_PARTS = 6
SHARED_BY = ("head", "layer", "token")  # victims, by ever more
IMAGE = -1  # stands for a token where a part of an image was


@dataclass(frozen=True)
class Session:
    """A saved sequence.

    facts : what must be equal in the context it is loaded into (model, types, RoPE).
    policy : whose traces these are; "" without. pins : spans that are never victims. granularity : who shared
    victims. n_evicted : entries evicted so far.
    tokens : int32[n_past], -1 where an image was. logits : float32[n_vocab] after the last token, or empty.
    memory : llama.cpp's state. cache : the eviction state, empty without eviction. Both are views of the file
    they were read from. traces : what the policy keeps of every entry.
    """

    facts: Mapping[str, Any]
    policy: str
    pins: tuple[Span, ...]
    granularity: str
    n_evicted: int
    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    memory: bytes | memoryview
    cache: bytes | memoryview
    traces: tuple[SavedTraces, ...]

    def to_bytes(self) -> bytes:
        """The session as a file."""
        headers, traces = pack(self.traces)
        books = {
            "policy": self.policy,
            "traces": headers,
            "pins": self.pins,
            "granularity": self.granularity,
            "n_evicted": self.n_evicted,
        }
        parts = [
            json.dumps({"facts": dict(self.facts), **books}).encode(),
            self.tokens.astype("<i4").tobytes(),
            self.logits.astype("<f4").tobytes(),
            self.memory,
            self.cache,
            traces,
        ]
        body = [piece for part in parts for piece in (SIZE.pack(len(part)), part)]
        digest = hashlib.sha256()
        for piece in body:
            digest.update(piece)
        n_bytes = HEAD.size + sum(map(len, body))
        return b"".join([HEAD.pack(MAGIC, FORMAT, n_bytes, digest.digest()), *body])

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Session:
        """Read what `to_bytes` wrote.  Raises StateFileError."""
        parts = _split(_checked(memoryview(data).cast("B")))
        try:
            books = json.loads(bytes(parts[0]))
            return cls(
                facts=dict(books["facts"]),
                policy=str(books["policy"]),
                pins=tuple((int(start), int(end)) for start, end in books["pins"]),
                granularity=SHARED_BY[SHARED_BY.index(books["granularity"])],
                n_evicted=int(books["n_evicted"]),
                tokens=np.frombuffer(parts[1], "<i4").astype(np.int32),
                logits=np.frombuffer(parts[2], "<f4").astype(np.float32),
                memory=parts[3].toreadonly(),
                cache=parts[4].toreadonly(),
                traces=unpack(books["traces"], parts[5]),
            )
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise unreadable(str(error)) from error


def _checked(data: memoryview) -> memoryview:
    """What the head says is in the file, byte for byte.  Raises StateFileError."""
    if data[: len(MAGIC)] != MAGIC:
        raise StateFileError("this is no saved session of h2o-gguf: load what save_state returned")
    if len(data) < HEAD.size:
        raise StateFileError(f"the saved session is cut off after {len(data)} bytes: save it again")
    _, written, size, digest = HEAD.unpack_from(data)
    if written != FORMAT:
        by, what = (
            ("a newer", "update h2o-gguf, or load it with the one that saved it")
            if written > FORMAT
            else ("an older", "load it with the one that saved it, or read its text again and save that")
        )
        raise StateFileError(
            f"the session was saved in format {written}, by {by} version of h2o-gguf than this one, which "
            f"reads format {FORMAT} alone: {what}"
        )
    if size != len(data):
        raise StateFileError(
            f"the saved session has {len(data)} bytes instead of {size}: save or copy it again"
        )
    body = data[HEAD.size :]
    if hashlib.sha256(body).digest() != digest:
        raise StateFileError("the saved session is damaged, its checksum is wrong: save or copy it again")
    return body


def _split(body: memoryview) -> list[memoryview]:
    """The parts, all of the body and no more.  Raises StateFileError."""
    parts: list[memoryview] = []
    for _ in range(N_PARTS):
        if len(body) < SIZE.size:
            raise unreadable(f"{len(parts)} parts instead of {N_PARTS}")
        end = SIZE.size + SIZE.unpack_from(body)[0]
        if end > len(body):
            raise unreadable(f"a part of {end} bytes where {len(body)} are left")
        parts.append(body[SIZE.size : end])
        body = body[end:]
    if body:
        raise unreadable(f"{len(body)} bytes after the last part")
    return parts


def unreadable(why: str) -> StateFileError:
    """The checksum is right, but another program made the file."""
    return StateFileError(f"the saved session was not written by h2o-gguf ({why}): save it again")
