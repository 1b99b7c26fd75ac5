"""Saving the sequence of an engine, and putting a saved one in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from h2o_gguf.engine import Engine
from h2o_gguf.errors import StateFileError
from h2o_gguf.pins import check_pins
from h2o_gguf.policies import granularity_of
from h2o_gguf.saved_traces import check_traces
from h2o_gguf.state import IMAGE, SHARED_BY, Session, unreadable

__all__ = ["SequenceCopy", "put_session", "restore_session", "save_session"]


class SequenceCopy:
    """All that an engine knows of its sequence, for when something else was tried in vain."""

    def __init__(self, engine: Engine) -> None:
        self._session = save_session(engine, {}) if engine.n_past > 0 else None
        self._bookmarks = engine.bookmarks()

    def put_back(self, engine: Engine) -> None:
        """Make the engine be where it was; empty, where even that fails."""
        try:
            if self._session is None:
                engine.reset()
            else:
                put_session(engine, self._session)
            engine.go_back_to(self._bookmarks)
        except Exception:  # there was an error before this one, which says more
            engine.reset()


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
    before = SequenceCopy(engine)
    try:
        put_session(engine, session)
        engine.keep_budget()
    except BaseException:
        before.put_back(engine)
        raise


def _check_belongs(engine: Engine, session: Session, facts: Mapping[str, Any]) -> None:
    for name in {**facts, **session.facts}:
        value = facts.get(name)
        if session.facts.get(name) != value:
            raise StateFileError(
                f"the session was saved with {name} {session.facts.get(name)!r}, this context has {value!r}: "
                "load it with the same model, cache types, budgets by layer, flash attention and RoPE options"
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
        raise unreadable(f"tokens outside the vocabulary of {n_vocab}")
    if session.logits.size not in (0, n_vocab):
        raise unreadable(f"{session.logits.size} logits for a vocabulary of {n_vocab}")
    if np.isnan(session.logits).any():
        raise unreadable("logits that are no numbers")
    groups = engine.cache.groups if engine.cache is not None else ()
    n_head_kv = {tuple(group.layer_ids): int(group.n_head_kv) for group in groups if session.traces}
    try:
        check_traces(session.traces, n_head_kv, session.tokens.size)
    except ValueError as error:
        raise unreadable(str(error)) from error
    if engine.policy is not None:
        check_pins(session.pins, engine.policy)


def put_session(engine: Engine, session: Session) -> None:
    """Make the engine go on where its own save_session was, but for its bookmarks; after an error reset it.

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
        raise unreadable(f"{session.tokens.size} tokens, and a memory of {engine.context.n_past()}")
    engine.adopt(
        session.tokens.tolist(),
        session.logits.copy() if session.logits.size else None,
        session.traces if session.policy == _policy(engine) else (),
    )


def _policy(engine: Engine) -> str:
    return engine.policy.name if engine.policy is not None else ""


def _granularity(engine: Engine) -> str:
    """Who shares victims; without a policy nobody has any."""
    return granularity_of(engine.policy) if engine.policy is not None else "head"
