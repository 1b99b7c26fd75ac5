"""Sessions as another program could write them, and all that a refused one must not change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from h2o_gguf.state import FORMAT, HEAD, MAGIC, SIZE


def everything(llama: Any) -> dict[str, Any]:
    """All that an object knows of its sequence: the books, what the policy keeps, every cell, the attic."""
    engine = llama.engine
    evictor, attic, mark = engine._evictor, engine.attic, engine._mark
    known = {
        "tokens": list(engine.tokens),
        "token array": engine.token_array.tolist(),
        "context": engine.context.n_past(),
        "pins": engine.pins,
        "policy": engine.policy,
        "logits": _plain(engine.logits),
        "mark": None if mark is None else (mark[0], _plain(mark[1])),
        "recalls": (engine.recalls.is_on, engine.recalls._is_armed),
        "report": engine.report(),
        "session": llama.save_state().llama_state,
        "rows": _plain(llama.scores),
    }
    if evictor is not None:
        known["evictor"] = (evictor.pins, evictor.n_prompt, evictor._n_untraced)
        known["traces"] = {layers: traces.n_seen for layers, traces in evictor._traces.items()}
    if attic is not None:
        known["turn"] = attic.n_before_turn
    for i, group in enumerate(engine.cache.groups if engine.cache is not None else ()):
        view = group.view()
        known[f"group {i}"] = (
            [_plain(each) for each in (view.pos, view.rope_pos, view.scores, view.recalled)],
            (group.n_evicted, group.n_evictions, group.n_rebases, group.rollback_min(), group.attic.info()),
            [_plain(group.attic.positions(layer)) for layer in range(group.n_layer)],
            [
                _plain(traces.at(view.pos))
                for layers, traces in evictor._traces.items()
                if layers == tuple(view.layer_ids)
            ],
        )
    return known


def _plain(array: Any) -> Any:
    return None if array is None else (array.shape, np.ascontiguousarray(array).tobytes())


@contextmanager
def unchanged(llama: Any) -> Iterator[None]:
    """What fails in this block leaves the sequence as it was, bit for bit."""
    before = everything(llama)
    yield
    after = everything(llama)
    assert [name for name in before if before[name] != after[name]] == [] and before.keys() == after.keys()


def as_file(*parts: bytes) -> bytes:
    """Parts under a right checksum, as another program could write them."""
    body = b"".join(SIZE.pack(len(part)) + part for part in parts)
    return HEAD.pack(MAGIC, FORMAT, HEAD.size + len(body), hashlib.sha256(body).digest()) + body


def parts_of(data: bytes) -> list[bytes]:
    parts, at = [], HEAD.size
    while at < len(data):
        (n,) = SIZE.unpack_from(data, at)
        parts.append(data[at + SIZE.size : at + SIZE.size + n])
        at += SIZE.size + n
    return parts
