"""Runs models in the native library, for tests that need one; says why when there is none."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_log: list[str] = []
_keep: list[Any] = []


def library() -> tuple[Any, str]:
    """The llama_cpp module with its library loaded, or None and the reason."""
    with contextlib.suppress(Exception):
        import h2o_gguf.bindings  # noqa: F401  (points llama_cpp to the library this package brings)
    try:
        import llama_cpp
    except Exception as error:
        return None, f"no native library: {error}"
    if not _keep:

        def take(_level: int, text: bytes, _data: object) -> None:
            _log.append(text.decode("utf-8", "replace"))

        _keep.append(llama_cpp.llama_log_callback(take))
        llama_cpp.llama_log_set(_keep[0], None)
        llama_cpp.llama_backend_init()  # which may load backends, and says so
    llama_cpp.llama_log_set(_keep[0], None)
    return llama_cpp, ""


@contextlib.contextmanager
def model(path: Path, *, no_alloc: bool = False) -> Iterator[Any]:
    """A loaded model, freed at the end.  no_alloc : its contexts know every size and allocate nothing."""
    lib, why = library()
    assert lib is not None, why
    _log.clear()
    params = lib.llama_model_default_params()
    params.no_alloc = no_alloc
    if no_alloc:
        params.load_mode = lib.LLAMA_LOAD_MODE_NONE  # mapping the weights would allocate them
    loaded = lib.llama_model_load_from_file(str(path).encode(), params)
    assert loaded, _last_words()
    try:
        yield loaded
    finally:
        lib.llama_model_free(loaded)


@contextlib.contextmanager
def context(
    loaded: Any,
    *,
    n_ctx: int = 256,
    n_ubatch: int = 512,
    type_k: int = 1,
    type_v: int = 1,
    swa_full: bool = False,
) -> Iterator[tuple[Any, str]]:
    """A context with flash attention and the log of making it; freed at the end."""
    lib, _ = library()
    _log.clear()
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, max(n_ctx, n_ubatch), n_ubatch
    params.n_threads = params.n_threads_batch = 1  # tiny, and spinning threads starve each other
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.type_k, params.type_v, params.swa_full = type_k, type_v, swa_full
    made = lib.llama_init_from_model(loaded, params)
    assert made, _last_words()
    try:
        yield made, "".join(_log)
    finally:
        lib.llama_free(made)


def logits(path: Path, tokens: Sequence[int], **options: Any) -> np.ndarray:
    """float32[n_tokens, n_vocab]: the logits after each token, decoded one by one."""
    lib, _ = library()
    rows = []
    with model(path) as loaded, context(loaded, **options) as (made, _):
        n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(loaded))
        for token in tokens:
            one = (lib.llama_token * 1)(token)  # the batch only points to it
            assert lib.llama_decode(made, lib.llama_batch_get_one(one, 1)) == 0, _last_words()
            rows.append(np.ctypeslib.as_array(lib.llama_get_logits(made), (n_vocab,)).copy())
    return np.array(rows)


def embedding(path: Path, tokens: Sequence[int], n_embd: int) -> np.ndarray:
    """float32[n_embd]: the pooled embedding of an encoder."""
    lib, _ = library()
    with model(path) as loaded, context(loaded) as (made, _):
        lib.llama_set_embeddings(made, True)
        array = (lib.llama_token * len(tokens))(*tokens)
        assert lib.llama_encode(made, lib.llama_batch_get_one(array, len(tokens))) == 0, _last_words()
        return np.ctypeslib.as_array(lib.llama_get_embeddings_seq(made, 0), (n_embd,)).copy()


def _last_words() -> str:
    return "".join(_log)[-1000:]


_MIB = r"+([\d.]+) MiB"
_SIZE = re.compile(rf"(\w+): size = {_MIB} \( *(\d+) cells, .*?\): {_MIB}, . \([^)]*\): {_MIB}")


def logged_sizes(log: str) -> list[tuple[str, int, float, float]]:
    """(kind, n_cells, MiB of K or R, MiB of V or S) of each cache in the log; kind is llama.cpp's class."""
    found = []
    for line in log.splitlines():
        if match := _SIZE.search(line):
            found.append((match[1], int(match[3]), float(match[4]), float(match[5])))
    return found


__all__ = ["context", "embedding", "library", "logged_sizes", "logits", "model"]
