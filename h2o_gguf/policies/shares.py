"""Budgets and shares: ratios and defaults become numbers here, once."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

from h2o_gguf.errors import BudgetError

__all__ = ["AUTO", "HALF", "QUARTER", "Budget", "check_budget", "resolve_budget", "whole"]

AUTO = -1  # an n_recent that follows from the budget
HALF, QUARTER = 2, 4  # of what the sinks leave


@dataclass(frozen=True)
class Budget:
    """Entries per KV head: budget in all after an eviction, n_sink and n_recent of them protected."""

    budget: int
    n_sink: int
    n_recent: int


def resolve_budget(
    n_ctx: int,
    kv_budget: int | None = None,
    heavy_ratio: float | None = None,
    recent_ratio: float | None = None,
    n_recent: int | None = None,
    n_sink: int = 4,
) -> Budget:
    """Return the numbers behind what a caller asked for.

    n_ctx : tokens, >= 1; ratios are shares of it.
    kv_budget : entries, 1 to n_ctx; not together with ratios. Without either, n_ctx.
    heavy_ratio, recent_ratio : 0 to 1, together at most 1; one alone stands for both. The budget is their
        sum; sinks come out of the heavy share, and out of the recent one where that is smaller.
    n_recent : entries, >= 0; not together with recent_ratio. Without either, see check_budget.
    n_sink : entries, >= 0.

    Raises: BudgetError, a value is outside its range, two contradict each other, or sinks and recent window
        together exceed the budget.
    Source: arXiv 2306.14048 (shares of the context, of equal size).
    """
    n_ctx = whole("n_ctx", n_ctx, 1)
    if heavy_ratio is None and recent_ratio is None:
        budget = n_ctx if kv_budget is None else kv_budget
    else:
        if kv_budget is not None:
            raise BudgetError(
                f"kv_budget {kv_budget} and a ratio both size the budget: give one", budget=kv_budget
            )
        if n_recent is not None and recent_ratio is not None:
            raise BudgetError(
                f"n_recent {n_recent} and recent_ratio {recent_ratio} both size the window: give one"
            )
        heavy = _ratio("heavy_ratio", recent_ratio if heavy_ratio is None else heavy_ratio)
        if n_recent is not None:
            budget = round(heavy * n_ctx) + whole("n_recent", n_recent, 0)
        else:
            recent = _ratio("recent_ratio", heavy_ratio if recent_ratio is None else recent_ratio)
            if heavy + recent > 1.0:
                raise BudgetError(
                    f"heavy_ratio {heavy} + recent_ratio {recent} = {heavy + recent} of the context: "
                    "together they may be at most 1"
                )
            budget = round((heavy + recent) * n_ctx)
            n_recent = min(round(recent * n_ctx), max(0, budget - whole("n_sink", n_sink, 0)))
        ratios = " and ".join(
            f"{name} {value}"
            for name, value in (("heavy_ratio", heavy_ratio), ("recent_ratio", recent_ratio))
            if value is not None
        )
        if budget < 1:
            raise BudgetError(f"{ratios} of {n_ctx} tokens: less than one entry, raise it", budget=budget)
        if whole("n_sink", n_sink, 0) + n_recent > budget:
            raise BudgetError(
                f"{ratios} of {n_ctx} tokens: a budget of {budget} entries, too few for {n_sink} sinks and a "
                f"recent window of {n_recent}; raise the ratio, or lower n_sink or n_recent",
                budget=budget,
                n_sink=n_sink,
                n_recent=n_recent,
            )
    found = check_budget(budget, n_sink, AUTO if n_recent is None else whole("n_recent", n_recent, 0))
    if found.budget > n_ctx:
        raise BudgetError(
            f"the budget is {found.budget} entries but the context has {n_ctx} tokens: "
            f"lower the budget to at most {n_ctx}, or raise n_ctx",
            budget=found.budget,
        )
    return found


def check_budget(
    budget: int, n_sink: int, n_recent: int, n_recent_most: int | None = None, recent_part: int = HALF
) -> Budget:
    """Return the budget as plain ints, an n_recent of AUTO as a part of what the sinks leave.

    budget : entries, >= 1. n_sink : entries, >= 0. n_recent : entries, >= 0, or AUTO (-1).
    n_recent_most : what AUTO stands for at most; None: no limit. recent_part : 2 is a half, 4 a quarter.

    Raises: BudgetError, a value is outside its range, or they exceed the budget together.
    Source: arXiv 2306.14048 gives half of the budget to the recent window.
    """
    budget = whole("the budget", budget, 1)
    n_sink = whole("n_sink", n_sink, 0)
    n_recent = whole("n_recent", n_recent, AUTO)
    if n_recent == AUTO:
        n_recent = max(0, budget - n_sink) // recent_part
        if n_recent_most is not None:
            n_recent = min(n_recent, n_recent_most)
    n_protected = n_sink + n_recent
    if n_protected > budget:
        lower = " or ".join(name for name, n in (("n_sink", n_sink), ("n_recent", n_recent)) if n)
        raise BudgetError(
            f"{n_protected} entries per KV head are protected ({n_sink} sinks, {n_recent} recent), "
            f"the budget is {budget}: raise it (kv_budget) to {n_protected} or more, or lower {lower}",
            budget=budget,
            n_sink=n_sink,
            n_recent=n_recent,
        )
    return Budget(budget, n_sink, n_recent)


def whole(name: str, value: Any, at_least: int) -> int:
    """Return value as an int.  Raises: BudgetError, it is no whole number or less than at_least."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < at_least:
        raise BudgetError(f"{name} is {value!r}: it must be a whole number, {at_least} or more", budget=value)
    return number


def _ratio(name: str, value: Any) -> float:
    try:
        ratio = float(value)
    except (TypeError, ValueError):
        ratio = float("nan")
    if isinstance(value, bool | str) or not 0.0 <= ratio <= 1.0:
        raise BudgetError(f"{name} is {value!r}: it must be a number from 0 to 1")
    return ratio
