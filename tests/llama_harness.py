"""The real model, for tests of the engine and of H2OLlama."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest


@lru_cache(maxsize=1)
def find_model() -> Path | None:
    """SmolLM2: from H2O_GGUF_TEST_MODEL, or fetched before."""
    chosen = os.environ.get("H2O_GGUF_TEST_MODEL")
    if chosen:
        return Path(chosen)
    from h2o_gguf.models import catalog

    path = catalog.path(catalog.DEFAULT_MODEL)
    return path if path.is_file() else None


def model_path() -> str:
    """Path of SmolLM2; skips where it has not been fetched."""
    path = find_model()
    if path is None:
        pytest.skip("the default model is not here: run `h2o-gguf models fetch`, or set H2O_GGUF_TEST_MODEL")
    return str(path)


def open_llama(**options: Any) -> Any:
    """H2OLlama on SmolLM2; skips without the model or the runtime."""
    from h2o_gguf import bindings
    from h2o_gguf.errors import LibraryError

    path = model_path()
    try:
        bindings.version()
    except LibraryError as error:
        if os.environ.get("H2O_GGUF_REQUIRE_RUNTIME"):
            raise
        pytest.skip(str(error))
    from h2o_gguf import H2OLlama

    # One thread: two that wait for each other at barriers crawl on a busy machine.
    return H2OLlama(path, **{"n_threads": 1, **options})


def open_tiny(architecture: str, folder: Path, *, build: dict[str, Any] | None = None, **options: Any) -> Any:
    """H2OLlama on a tiny random model of this kind; skips without the runtime."""
    from harness import require_runtime
    from tiny_models import build as write

    require_runtime()
    from h2o_gguf import H2OLlama

    path = write(architecture, folder / f"{architecture}.gguf", **(build or {}))
    return H2OLlama(str(path), **{"n_threads": 1, **options})


def english(n_chars: int, skip: int = 0) -> str:
    """Prose that every Python has."""
    from pydoc_data.topics import topics  # type: ignore[import-untyped]

    return " ".join(str(text) for _, text in sorted(topics.items()))[skip : skip + n_chars]
