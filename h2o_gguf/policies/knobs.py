"""The numbers a policy is made with: checked, and worked out where they follow from others."""

from __future__ import annotations

from typing import Any

import numpy as np

from h2o_gguf.errors import OptionError
from h2o_gguf.policies.selection import check_granularity
from h2o_gguf.policies.shares import HALF, check_budget

__all__ = ["check_decay", "check_number", "check_whole", "settle"]


def settle(policy: Any, n_recent_most: int | None = None, recent_part: int = HALF) -> None:
    """Check the knobs of a frozen dataclass and turn an n_recent of AUTO into a number; for __post_init__.

    n_recent_most, recent_part : what AUTO stands for, as check_budget takes them.

    Raises: BudgetError, OptionError.
    """
    if "n_observed" in vars(policy):
        object.__setattr__(policy, "n_observed", check_whole("n_observed", policy.n_observed, 1))
    numbers = check_budget(policy.budget, policy.n_sink, policy.n_recent, n_recent_most, recent_part)
    object.__setattr__(policy, "budget", numbers.budget)
    object.__setattr__(policy, "n_sink", numbers.n_sink)
    object.__setattr__(policy, "n_recent", numbers.n_recent)
    check_decay(policy.decay)
    check_granularity(policy.granularity)


def check_whole(name: str, value: Any, at_least: int) -> int:
    """Return value as an int.  Raises: OptionError, it is no whole number or less than at_least."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < at_least:
        raise OptionError(f"{name} is {value!r}: it must be a whole number, {at_least} or more", name)
    return int(value)


def check_number(name: str, value: Any, low: float, high: float = np.inf) -> float:
    """Return value as a float.  Raises: OptionError, it is no number from low to high."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | np.floating)
        or not low <= value <= high
        or not np.isfinite(value)
    ):
        span = f"from {low:g} to {high:g}" if np.isfinite(high) else f"{low:g} or more"
        raise OptionError(f"{name} is {value!r}: it must be a number, {span}", name)
    return float(value)


def check_decay(decay: Any) -> float:
    """Return decay as a float.  Raises: OptionError, it is no number from 0 to 1."""
    if isinstance(decay, bool) or not isinstance(decay, int | float | np.floating) or not 0 <= decay <= 1:
        raise OptionError(f"decay is {decay!r}: it must be a number from 0 to 1 (1 forgets nothing)", "decay")
    return float(decay)
