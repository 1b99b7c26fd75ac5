"""The parameters of a cache, checked."""

from __future__ import annotations

from typing import Any

import numpy as np

from h2o_gguf.bindings.library import ffi
from h2o_gguf.errors import BudgetError, OptionError

__all__ = ["ATTENTIONS", "make_params"]

ATTENTIONS = ("auto", "fused", "composed", "reference")  # values of h2og_attention, in order


def make_params(
    budget: int,
    block: int,
    decay: float,
    attention: str,
    n_pos_max: int,
    is_scored: bool,
    n_observed: int,
) -> Any:
    """Return an h2og_params of what KVCache takes.  Raises: BudgetError, OptionError for illegal values."""
    for name, value, low in (
        ("budget", budget, 0),
        ("block", block, 1),
        ("n_pos_max", n_pos_max, 0),
        ("n_observed", n_observed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value < 2**31:
            text = f"{name} is {value!r}: it must be a whole number from {low} on"
            raise BudgetError(text, budget=value) if name == "budget" else OptionError(text, name)
    if not 0 < decay <= 1:
        raise OptionError(f"decay is {decay!r}: it must be above 0 and at most 1", "decay")
    if attention not in ATTENTIONS:
        raise OptionError(
            f"attention is {attention!r}: it must be one of {', '.join(ATTENTIONS)}", "attention"
        )
    params = ffi.new("h2og_params *")
    params.budget, params.block, params.decay = budget, block, decay
    params.attention, params.n_pos_max = ATTENTIONS.index(attention), n_pos_max
    params.is_scored, params.n_observed = bool(is_scored), n_observed
    return params
