"""Spans of positions that are never victims."""

from __future__ import annotations

from collections.abc import Sequence

from h2o_gguf.errors import BudgetError
from h2o_gguf.policies import LayerBudgets, Policy
from h2o_gguf.policies.shares import HALF, QUARTER

__all__ = ["Span", "budget_for", "check_pins"]

Span = tuple[int, int]  # half-open, positions
MAX_POSITION = 2**31 - 1  # of llama.cpp


def check_pins(pins: Sequence[Span], policy: Policy) -> tuple[Span, ...]:
    """Return the spans sorted and merged.

    Raises: BudgetError, a span is not 0 <= start <= end < 2**31, or they do not fit into the policy's budget
        beside its sinks and its recent window.
    """
    merged: list[list[int]] = []
    for start, end in sorted((int(s), int(e)) for s, e in pins):
        if not 0 <= start <= end <= MAX_POSITION:
            raise BudgetError(
                f"pinned span ({start}, {end}) is not 0 <= start <= end <= {MAX_POSITION}: pin "
                "positions of tokens",
                budget=policy.budget,
            )
        if start == end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    spans = tuple((start, end) for start, end in merged)
    if isinstance(policy, LayerBudgets):
        return _check_by_layer(spans, policy)
    n_pinned = sum(max(0, end - max(start, policy.n_sink)) for start, end in spans)
    if n_pinned + policy.n_sink + policy.n_recent > policy.budget:
        ways = [f"raise kv_budget to {budget_for(policy, n_pinned)} or more"]
        if policy.n_sink + policy.n_recent < policy.budget:
            ways.append("pin less")
        if (n_recent := policy.budget - policy.n_sink - n_pinned) > 0:
            ways.append(f"lower n_recent to {n_recent}")
        raise BudgetError(
            f"{n_pinned} pinned entries, {policy.n_sink} sinks and a recent window of {policy.n_recent} "
            f"do not fit into a budget of {policy.budget}: {', or '.join(ways)}",
            budget=policy.budget,
            n_sink=policy.n_sink,
            n_recent=policy.n_recent,
            n_pinned=n_pinned,
        )
    return spans


def _check_by_layer(spans: tuple[Span, ...], policy: LayerBudgets) -> tuple[Span, ...]:
    for budget, part in policy.parts.items():
        try:
            check_pins(spans, part)
        except BudgetError as error:
            if len(policy.parts) == 1:
                raise
            raise BudgetError(
                f"{error.n_pinned} pinned entries, {part.n_sink} sinks and a recent window of "
                f"{part.n_recent} do not fit into a budget of {budget}, which {policy.name} gives to some "
                "layers: raise kv_budget, split it less steeply (layer_budgets), or pin less",
                budget=budget,
                n_sink=part.n_sink,
                n_recent=part.n_recent,
                n_pinned=error.n_pinned,
            ) from error
    return spans


def budget_for(policy: Policy, n_pinned: int) -> int:
    """A budget that n_pinned entries beside the sinks fit into, also if the recent window grows with it."""
    for part in (HALF, QUARTER):  # of what the sinks leave is the window
        if policy.n_recent == max(0, policy.budget - policy.n_sink) // part:
            return policy.n_sink + -(-n_pinned * part // (part - 1))
    return policy.n_sink + n_pinned + policy.n_recent
