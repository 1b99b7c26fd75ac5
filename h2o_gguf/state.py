"""Saved sessions: everything a sequence needs to go on in another process."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.engine import Engine
from h2o_gguf.errors import StateFileError

__all__ = ["Session", "restore_session", "save_session"]

MAGIC = b"H2OGSES1"
SHARED_BY = ("head", "layer", "token")  # victims, by ever more


@dataclass(frozen=True)
class Session:
    """A saved sequence.

    facts : what must be equal in the context it is loaded into (model, types, RoPE), pins, and who shared
        victims of the entries evicted so far.
    tokens : int32[n_past], -1 where an image was. logits : float32[n_vocab] after the last token, or empty.
    memory : llama.cpp's state. cache : the eviction state, empty without eviction.
    """

    facts: Mapping[str, Any]
    tokens: NDArray[np.int32]
    logits: NDArray[np.float32]
    memory: bytes
    cache: bytes

    def to_bytes(self) -> bytes:
        """The session as a file."""
        parts = [
            json.dumps(self.facts).encode(),
            self.tokens.astype("<i4").tobytes(),
            self.logits.astype("<f4").tobytes(),
            self.memory,
            self.cache,
        ]
        return b"".join([MAGIC, *(struct.pack("<Q", len(part)) + part for part in parts)])

    @classmethod
    def from_bytes(cls, data: bytes) -> Session:
        """Read what `to_bytes` wrote.  Raises StateFileError."""
        if data[: len(MAGIC)] != MAGIC:
            raise StateFileError("this is no saved session of h2o-gguf: save one with save_state")
        parts = []
        at = len(MAGIC)
        for _ in range(5):
            if at + 8 > len(data):
                raise StateFileError(f"the saved session is cut off after {len(data)} bytes: save it again")
            (size,) = struct.unpack_from("<Q", data, at)
            if at + 8 + size > len(data):
                raise StateFileError(f"the saved session is cut off after {len(data)} bytes: save it again")
            parts.append(data[at + 8 : at + 8 + size])
            at += 8 + size
        try:
            facts = json.loads(parts[0])
            tokens, logits = np.frombuffer(parts[1], "<i4"), np.frombuffer(parts[2], "<f4")
        except ValueError as error:
            raise StateFileError(f"the saved session is damaged ({error}): save it again") from error
        return cls(facts, tokens.astype(np.int32), logits.astype(np.float32), parts[3], parts[4])


def save_session(engine: Engine, facts: Mapping[str, Any]) -> Session:
    """The engine's sequence; its size grows with the cells used."""
    logits = engine.logits
    return Session(
        facts={
            **facts,
            "pins": engine.pins,
            "granularity": _granularity(engine),
            "n_evicted": engine.report().evicted,
        },
        tokens=np.asarray(engine.tokens, np.int32),
        logits=logits if logits is not None else np.zeros(0, np.float32),
        memory=engine.context.save(),
        cache=engine.cache.save() if engine.cache is not None else b"",
    )


def restore_session(engine: Engine, session: Session, facts: Mapping[str, Any]) -> None:
    """Make the engine go on where the session was saved.

    Raises: StateFileError, the session belongs to another model or kind of cache, or does not fit; in the
        last case the engine is left empty.
    """
    for name, value in facts.items():
        if session.facts.get(name) != value:
            raise StateFileError(
                f"the session was saved with {name} {session.facts.get(name)!r}, this context has {value!r}: "
                "load it with the same model, cache types and RoPE options"
            )
    if bool(session.cache) != (engine.cache is not None):
        was, now = ("with", "without") if session.cache else ("without", "with")
        raise StateFileError(
            f"the session was saved {was} eviction and this context is {now}: use the same policy"
        )
    was, now = str(session.facts.get("granularity", "head")), _granularity(engine)
    if session.facts.get("n_evicted") and SHARED_BY.index(was) < SHARED_BY.index(now):
        raise StateFileError(
            f"the session's {session.facts['n_evicted']} evictions were by {was} and this context evicts by "
            f"{now}, which needs the same entries in all of them: load it with granularity {was!r}"
        )
    engine.reset()
    engine.pins = [(int(start), int(end)) for start, end in session.facts.get("pins", [])]
    try:
        if not engine.context.load(session.memory):
            raise StateFileError(
                f"llama.cpp refuses the session of {session.tokens.size} tokens: "
                "the context may be smaller than the one it was saved from"
            )
        if engine.cache is not None:
            engine.cache.load(session.cache)
    except BaseException:
        engine.reset()
        raise
    engine.adopt(session.tokens.tolist(), session.logits.copy() if session.logits.size else None)
    engine.keep_budget()


def _granularity(engine: Engine) -> str:
    """Who shares victims; for a policy that does not say, each head has its own."""
    granularity = getattr(engine.policy, "granularity", None)
    return granularity if granularity in SHARED_BY else "head"
