"""Tiny GGUF models with random weights: good for behaviour, useless for quality.

`build("gemma3", path)` writes one; `ARCHITECTURES` says what is expected of each. Each of them loads and
decodes in unmodified llama.cpp (tests/unit/test_models_tiny.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .decoders import DECODERS
from .encoders import ENCODERS
from .expected import ARCHITECTURES, Expected
from .mixers import MIXERS
from .writer import Tiny

__all__ = ["ARCHITECTURES", "Expected", "build"]

_BUILDERS = {**DECODERS, **MIXERS, **ENCODERS}


def build(
    arch: str, path: Path | str, *, n_layer: int = 2, n_ctx_train: int = 256, seed: int = 0, **options: Any
) -> Path:
    """Write a model of this kind (a key of ARCHITECTURES) and return its path.

    Options: n_head=4, n_head_kv=2 (where the architecture has GQA), head_dim=64, n_ff=128, n_swa=32 (windowed
    kinds), chat_template=str. The same arguments give the same bytes.
    """
    path = Path(path)
    tiny = Tiny(path, n_layer=n_layer, n_ctx_train=n_ctx_train, seed=seed, **options)
    _BUILDERS[arch](tiny)
    tiny.write()
    return path
