"""Which layers look back through a sliding window only, and how far: llama.cpp's rule per architecture."""

from __future__ import annotations

from dataclasses import dataclass

from h2o_gguf.errors import ModelFileError
from h2o_gguf.models.header import Header

__all__ = ["windows_of"]


@dataclass(frozen=True)
class _Rule:
    """every : each so many layers one sees everything. dense_first : the first of them, not the last.

    n_swa : the window when the file names none (0: then there is no window). is_fixed : n_swa wins over
    the file. has_array : the file must say which layers are windowed.
    """

    every: int = 1
    dense_first: bool = False
    n_swa: int = 0
    is_fixed: bool = False
    has_array: bool = False


_RULES = {
    "afmoe": _Rule(4),
    "cohere2": _Rule(4),
    "cohere2moe": _Rule(4, dense_first=True),
    "exaone-moe": _Rule(4, n_swa=128),
    "exaone4": _Rule(4, n_swa=4096),
    "gemma2": _Rule(2, n_swa=4096),
    "gemma3": _Rule(6),
    "gemma3n": _Rule(5),
    "gpt-oss": _Rule(2),
    "laguna": _Rule(4, dense_first=True),
    "llama4": _Rule(4, n_swa=8192, is_fixed=True),
    "mellum": _Rule(4),
    "muse-glimmer": _Rule(4),
    "olmo2": _Rule(4),
    "plamo3": _Rule(8),
    "smallthinker": _Rule(4, dense_first=True, n_swa=4096, is_fixed=True),
    "gemma4": _Rule(has_array=True),
    "gemma4-assistant": _Rule(has_array=True),
    "granite_swa": _Rule(has_array=True),
    "maple": _Rule(has_array=True),
    "mimo2": _Rule(has_array=True),
    "spark2_5": _Rule(has_array=True),
    "step35": _Rule(has_array=True),
}


def windows_of(header: Header, n_layer: int, n_all: int) -> tuple[int, tuple[bool, ...]]:
    """Window in tokens (0 none), and which layers have it.

    phi3 files name a window that llama.cpp ignores; lfm2 windows every attention layer (its caller knows
    which those are).
    """
    name = header.architecture
    none = (False,) * n_all
    if name == "lfm2":
        return header.number("attention.sliding_window", 0), none
    rule = _RULES.get(name)
    if rule is None or (name == "exaone4" and n_layer != 64):
        return 0, none
    n_swa = header.number("attention.sliding_window", 0 if name == "smallthinker" else rule.n_swa)
    if n_swa <= 0:
        return 0, none
    if rule.is_fixed:
        n_swa = rule.n_swa
    return n_swa, _layers(header, rule, n_layer, n_all)


def _layers(header: Header, rule: _Rule, n_layer: int, n_all: int) -> tuple[bool, ...]:
    pattern = header.get("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        if len(pattern) < n_layer:
            raise ModelFileError(
                header.path,
                f"its window pattern has {len(pattern)} entries for {n_layer} layers",
            )
        flags = tuple(bool(v) for v in pattern[:n_all])
        return flags + (False,) * (n_all - len(flags))
    if pattern is None and rule.has_array:
        raise ModelFileError(header.path, f"it lacks {header.architecture}.attention.sliding_window_pattern")
    every = header.number("attention.sliding_window_pattern", rule.every)
    spare = 0 if rule.dense_first else every - 1
    return tuple(il < n_layer and (every == 0 or il % every != spare) for il in range(n_all))
