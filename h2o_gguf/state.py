"""Saved sessions: everything a sequence needs to go on in another process."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.engine import Engine
from h2o_gguf.errors import StateFileError
from h2o_gguf.eviction import Span, check_pins
from h2o_gguf.policies import granularity_of
from h2o_gguf.saved_traces import SavedTraces, pack, unpack

__all__ = ["Session", "put_session", "restore_session", "save_session"]

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
    memory : llama.cpp's state. cache : the eviction state, empty without eviction. traces : what the policy
    keeps of every entry.
    """

    facts: Mapping[str, Any]
    policy: str
    pins: tuple[Span, ...]
    granularity: str
    n_evicted: int
    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    memory: bytes
    cache: bytes
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
        body = b"".join(piece for part in parts for piece in (SIZE.pack(len(part)), part))
        return HEAD.pack(MAGIC, FORMAT, HEAD.size + len(body), hashlib.sha256(body).digest()) + body

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
                memory=bytes(parts[3]),
                cache=bytes(parts[4]),
                traces=unpack(books["traces"], bytes(parts[5])),
            )
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise _unreadable(str(error)) from error


def _checked(data: memoryview) -> memoryview:
    """What the head says is in the file, byte for byte.  Raises StateFileError."""
    if data[: len(MAGIC)] != MAGIC:
        raise StateFileError("this is no saved session of h2o-gguf: load what save_state returned")
    if len(data) < HEAD.size:
        raise StateFileError(f"the saved session is cut off after {len(data)} bytes: save it again")
    _, written, size, digest = HEAD.unpack_from(data)
    if written != FORMAT:
        raise StateFileError(
            f"the session was saved in format {written} and this version of h2o-gguf reads format {FORMAT}: "
            "save it again with this version"
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
            raise _unreadable(f"{len(parts)} parts instead of {N_PARTS}")
        end = SIZE.size + SIZE.unpack_from(body)[0]
        if end > len(body):
            raise _unreadable(f"a part of {end} bytes where {len(body)} are left")
        parts.append(body[SIZE.size : end])
        body = body[end:]
    if body:
        raise _unreadable(f"{len(body)} bytes after the last part")
    return parts


def _unreadable(why: str) -> StateFileError:
    """The checksum is right, but another program made the file."""
    return StateFileError(f"the saved session was not written by h2o-gguf ({why}): save it again")


def save_session(engine: Engine, facts: Mapping[str, Any]) -> Session:
    """The engine's sequence; its size grows with the cells used."""
    logits = engine.logits
    return Session(
        facts=facts,
        policy=_policy(engine),
        pins=tuple(engine.pins),
        granularity=_granularity(engine),
        n_evicted=engine.report().evicted,
        tokens=np.asarray(engine.tokens, np.int32),
        logits=logits if logits is not None else np.zeros(0, np.float32),
        memory=engine.context.save(),
        cache=engine.cache.save() if engine.cache is not None else b"",
        traces=engine.traces(),
    )


def restore_session(engine: Engine, session: Session, facts: Mapping[str, Any]) -> None:
    """Make the engine go on where the session was saved; with an error it stays where it was.

    Raises: StateFileError, the session belongs to another model or kind of cache, or does not fit;
        BudgetError, what it pins does not fit into the budget.
    """
    _check_belongs(engine, session, facts)
    before = save_session(engine, facts)
    try:
        put_session(engine, session)
    except BaseException:
        put_session(engine, before)
        raise


def _check_belongs(engine: Engine, session: Session, facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        if session.facts.get(name) != value:
            raise StateFileError(
                f"the session was saved with {name} {session.facts.get(name)!r}, this context has {value!r}: "
                "load it with the same model, cache types, flash attention and RoPE options"
            )
    if bool(session.cache) != (engine.cache is not None):
        was, now = ("with", "without") if session.cache else ("without", "with")
        raise StateFileError(
            f"the session was saved {was} eviction and this context is {now}: use the same policy"
        )
    was, now = session.granularity, _granularity(engine)
    if session.n_evicted and SHARED_BY.index(was) < SHARED_BY.index(now):
        raise StateFileError(
            f"the session's {session.n_evicted} evictions were by {was} and this context evicts by "
            f"{now}, which needs the same entries in all of them: load it with granularity {was!r}"
        )
    if session.tokens.size > engine.n_ctx:
        raise StateFileError(
            f"the session has {session.tokens.size} tokens and this context holds {engine.n_ctx}: "
            "load it with a larger n_ctx"
        )
    n_vocab = engine.context.vocab.n_tokens
    if session.tokens.size and not IMAGE <= session.tokens.min() <= session.tokens.max() < n_vocab:
        raise _unreadable(f"tokens outside the vocabulary of {n_vocab}")
    if session.logits.size not in (0, n_vocab):
        raise _unreadable(f"{session.logits.size} logits for a vocabulary of {n_vocab}")
    if engine.policy is not None:
        check_pins(session.pins, engine.policy)


def put_session(engine: Engine, session: Session) -> None:
    """Make the engine go on where its own save_session was; after an error it must be reset.

    Raises: StateFileError, BudgetError.
    """
    engine.reset()
    engine.pins = list(session.pins)
    if not engine.context.load(session.memory):
        raise StateFileError(
            f"llama.cpp refuses the session of {session.tokens.size} tokens: "
            "the context may be smaller than the one it was saved from"
        )
    if engine.cache is not None:
        engine.cache.load(session.cache)
    if engine.context.n_past() != session.tokens.size:
        raise _unreadable(f"{session.tokens.size} tokens, and a memory of {engine.context.n_past()}")
    engine.adopt(
        session.tokens.tolist(),
        session.logits.copy() if session.logits.size else None,
        session.traces if session.policy == _policy(engine) else (),
    )
    engine.keep_budget()


def _policy(engine: Engine) -> str:
    return engine.policy.name if engine.policy is not None else ""


def _granularity(engine: Engine) -> str:
    """Who shares victims; without a policy nobody has any."""
    return granularity_of(engine.policy) if engine.policy is not None else "head"
