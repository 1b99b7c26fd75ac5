"""What llama.cpp takes for granted of a model's header, and ends the process over where it is not so."""

from __future__ import annotations

import math
from collections.abc import Iterator

from h2o_gguf.errors import ModelFileError
from h2o_gguf.models.header import Header

__all__ = ["check_limits"]

MAX_EXPERTS = 1024
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")


def check_limits(header: Header) -> None:
    """Refuse a header that would end the process.  Raises ModelFileError."""
    for problem in (*_epsilons(header), *_experts(header), *_rope_scaling(header)):
        raise ModelFileError(header.path, f"{problem}: the file is damaged")


def _epsilons(header: Header) -> Iterator[str]:
    for key in ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"):
        value = header.get(key, 0.0)
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            yield f"{header.architecture}.{key} is {value!r}, not a number above 0"


def _experts(header: Header) -> Iterator[str]:
    n = header.number("expert_count", 0, high=MAX_EXPERTS)
    if n <= 1 and header.architecture in ("hunyuan_vl", "hunyuan-dense"):  # one expert is none there
        return
    given = header.get("expert_used_count", 0)
    name = f"{header.architecture}.expert_used_count"
    n_used = max(
        (header.checked(name, v) for v in (given if isinstance(given, tuple) else (given,))), default=0
    )
    if n_used > n or (n_used == 0) != (n == 0):
        yield f"it uses {n_used} of its {n} experts at once"
    n_groups = header.number("expert_group_count", 0)
    if n_groups and (n_groups >= n or n % n_groups):
        yield f"its {n} experts cannot form {n_groups} groups"
    if n_groups > 1 and not 0 < (n_group_used := header.number("expert_group_used_count", 0)) < n_groups:
        yield f"it uses {n_group_used} of its {n_groups} groups of experts at once"


def _rope_scaling(header: Header) -> Iterator[str]:
    kind = header.get("rope.scaling.type", "none")
    if kind not in ROPE_SCALINGS:
        yield f"{header.architecture}.rope.scaling.type is {kind!r}, known are {', '.join(ROPE_SCALINGS)}"
