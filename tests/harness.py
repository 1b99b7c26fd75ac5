"""A tiny model in a context with an eviction cache attached, for tests."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tiny_models import native

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}
# Every RoPE kind: plain, YaRN, linear, per-frequency factors, M-RoPE, partial, LongRoPE, NeoX, MLA.
ROTATED = [
    "llama", "llama-yarn", "llama-linear", "llama-rope-factors", "qwen2", "qwen2vl", "phi2", "phi3",
    "phi3-longrope", "gptneox", "deepseek2", "deepseek2-mha",
]  # fmt: skip
WINDOWED = ["gemma3", "gemma2", "gpt-oss"]


def require_runtime() -> Any:
    """The module h2o_gguf.bindings with its library loaded; skips where there is none and none must be."""
    from h2o_gguf import bindings
    from h2o_gguf.errors import LibraryError

    try:
        bindings.version()
    except LibraryError as error:
        if os.environ.get("H2O_GGUF_REQUIRE_RUNTIME"):
            raise
        pytest.skip(str(error))
    native.library()  # quiet
    return bindings


@dataclass
class Run:
    """A context, its eviction cache, and what has been decoded."""

    ctx: Any
    cache: Any
    lib: Any
    n_vocab: int
    model: Any = None
    seq: int = 0
    tokens: list[int] = field(default_factory=list)

    def decode(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Decode at the next positions; return float32[n_tokens, n_vocab]."""
        code, logits = self.try_decode(tokens)
        if code != 0:
            raised = self.cache.raised() if self.cache else None
            raise raised or RuntimeError(f"llama_decode returned {code}")
        self.tokens += tokens
        return logits

    def try_decode(self, tokens: Sequence[int]) -> tuple[int, NDArray[np.float32]]:
        lib, n = self.lib, len(tokens)
        first = lib.llama_memory_seq_pos_max(self.memory, self.seq) + 1
        batch = lib.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, first + i, 1
                batch.seq_id[i][0], batch.logits[i] = self.seq, 1
            code = lib.llama_decode(self.ctx, batch)
            if code != 0:
                return code, np.empty((0, self.n_vocab), np.float32)
            return code, np.ctypeslib.as_array(lib.llama_get_logits(self.ctx), (n, self.n_vocab)).copy()
        finally:
            lib.llama_batch_free(batch)

    def feed(self, tokens: Sequence[int], chunk: int) -> NDArray[np.float32]:
        """Decode in chunks; return the logits of all."""
        return np.concatenate([self.decode(tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)])

    def remove(self, p0: int, p1: int = -1) -> bool:
        done = bool(self.lib.llama_memory_seq_rm(self.memory, self.seq, p0, p1))
        if done and p1 == -1:
            del self.tokens[p0:]
        return done

    def speak_of(self, seq: int, tokens: Sequence[int]) -> None:
        """Go on with another sequence, which has these tokens."""
        self.seq, self.tokens = seq, list(tokens)
        for group in self.cache.groups:
            group.seq = seq

    @property
    def memory(self) -> Any:
        return self.lib.llama_get_memory(self.ctx)

    def kept(self) -> NDArray[np.int32]:
        """Positions held, sorted: int32[n_layer, n_head_kv, n_used]."""
        pos = np.sort(self.cache.pos, axis=-1)
        return pos[..., pos.shape[-1] - self.cache.used() :]


@contextlib.contextmanager
def opened(
    path: Path,
    *,
    n_ctx: int = 256,
    n_ubatch: int = 64,
    type_k: str = "f16",
    type_v: str = "f16",
    flash: bool = True,
    n_threads: int = 1,
    n_seq: int = 1,
    layer_cells: Sequence[int] = (),
    budgets: Mapping[int, int] | None = None,
    **params: Any,
) -> Iterator[Run]:
    """Yield a Run of the first of n_seq sequences, of n_ctx cells each.

    params go to KVCache, or with budgets to GroupedCache; without any none is attached.
    """
    bindings = require_runtime()
    lib, _ = native.library()
    with native.model(path) as model:
        p = lib.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch = n_ctx * n_seq, n_ubatch, n_ubatch
        p.n_seq_max, p.kv_unified = n_seq, False
        p.n_threads = p.n_threads_batch = n_threads
        p.flash_attn_type = int(flash)
        p.type_k, p.type_v, p.swa_full = TYPES[type_k], TYPES[type_v], False
        bindings.set_layer_cells(ctypes.cast(model, ctypes.c_void_p).value, layer_cells)
        ctx = lib.llama_init_from_model(model, p)
        assert ctx, "no context"
        cache = None
        try:
            address = ctypes.cast(ctx, ctypes.c_void_p).value
            if budgets is not None:
                cache = bindings.GroupedCache(address, budgets, **params)
            elif params:
                cache = bindings.KVCache(address, **params)
            yield Run(ctx, cache, lib, lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model)), model)
        finally:
            if cache is not None:
                cache.close()
            lib.llama_free(ctx)


def view_of(native: Any, pins: tuple[tuple[int, int], ...] = ()) -> Any:
    """What a policy sees of a NativeView."""
    from h2o_gguf.view import CacheView

    return CacheView(
        native.scores, native.pos, native.n_past, native.n_used, native.decay, native.layer_ids, pins,
        native.observation,
    )  # fmt: skip


def policy_of(run: Run, policy: Any, pins: tuple[tuple[int, int], ...] = ()) -> None:
    """Let a policy of h2o_gguf.policies name the victims."""
    from h2o_gguf.policies import ask

    def victims(view: Any, n: int) -> Any:
        return ask(policy, view_of(view, pins), n)

    run.cache.set_policy(victims)


def evict_positions(run: Run, positions: list[int]) -> None:
    """Evict these positions from every head."""
    pos = run.cache.pos
    victims = np.empty((*pos.shape[:2], len(positions)), np.int32)
    for layer in range(pos.shape[0]):
        for head in range(pos.shape[1]):
            order = {int(p): cell for cell, p in enumerate(pos[layer, head]) if p >= 0}
            victims[layer, head] = [order[p] for p in positions]
    run.cache.evict(victims)


def random_tokens(n: int, seed: int = 0, n_vocab: int = 256) -> list[int]:
    """Tokens of the byte range, never a special one."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, n_vocab, n)]


def kl(p_logits: NDArray[Any], q_logits: NDArray[Any]) -> NDArray[np.float64]:
    """KL(p || q) of each row."""
    p, q = p_logits.astype(np.float64), q_logits.astype(np.float64)
    p -= np.logaddexp.reduce(p, -1, keepdims=True)
    q -= np.logaddexp.reduce(q, -1, keepdims=True)
    return (np.exp(p) * (p - q)).sum(-1)
