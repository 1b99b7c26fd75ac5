"""How a policy is asked, and what it may answer."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import BudgetError, CacheFullError, H2OError, PolicyError, in_short
from h2o_gguf.policies.base import Policy
from h2o_gguf.policies.selection import Cells
from h2o_gguf.view import CacheView

__all__ = ["ask", "ask_traces", "check_victims"]


def ask(policy: Policy, view: CacheView, n: int) -> Cells:
    """Return the policy's n victims per KV head, checked: int32[n_layer, n_head_kv, n].

    What was recalled is spared where others are enough; where they are not, it is asked once more, with a
    view in which nothing was.

    Raises: CacheFullError, it evicts nothing. BudgetError, fewer than n entries of a head may go; the text
        says what protects the others. PolicyError, it raised, or chose victims it may not choose.
    """
    if view.recalled is not None:
        with contextlib.suppress(BudgetError):
            return _answer(policy, view, n)
        view = replace(view, recalled=None)
    return _answer(policy, view, n)


def _answer(policy: Policy, view: CacheView, n: int) -> Cells:
    try:
        victims = policy.victims(view, n)
    except CacheFullError:
        raise
    except Exception as error:
        _refuse_too_few(view, n, policy)
        if isinstance(error, H2OError):
            raise
        raise PolicyError(f"it raised {in_short(error)}", policy=policy.name) from error
    return check_victims(view, victims, n, policy)


def ask_traces(policy: Any, view: CacheView) -> NDArray[np.float32]:
    """Return what observe(view) makes of the traces, checked: float32[n_trace, n_layer, n_head_kv, n_cells].

    Raises: PolicyError, it raised, or returned another shape or what is no finite number.
    """
    shape = (policy.n_trace, *view.shape)
    try:
        traces = np.asarray(policy.observe(view), np.float32)
    except H2OError:
        raise
    except Exception as error:
        raise PolicyError(f"observe raised {in_short(error)}", policy=policy.name) from error
    if traces.shape != shape:
        raise PolicyError(
            f"observe returned shape {list(traces.shape)}: it must be [n_trace, n_layer, n_head_kv, n_cells] "
            f"= {list(shape)}",
            policy=policy.name,
        )
    n_bad = traces.size - np.count_nonzero(np.isfinite(traces))
    if n_bad:
        raise PolicyError(f"observe returned {n_bad} traces that are no finite number", policy=policy.name)
    return traces


def check_victims(view: CacheView, victims: Any, n: int, policy: Policy) -> Cells:
    """Return victims as int32[n_layer, n_head_kv, n] if every one may go.

    A policy of its own mind may name what was recalled, unless it is all that is left.

    Raises: PolicyError, no array, wrong type or shape, a cell outside the cache, empty or protected, or one
        twice in a head. BudgetError, fewer than n entries of a head may go at all.
    """
    try:
        cells = _checked(replace(view, recalled=None), victims, n, policy)
    except PolicyError:
        _refuse_too_few(view, n, policy)
        raise
    if view.recalled is not None and np.take_along_axis(view.recalled, cells, axis=-1).any():
        _refuse_too_few(view, n, policy)
    return cells


def _checked(view: CacheView, victims: Any, n: int, policy: Policy) -> Cells:
    n_layer, n_head_kv, n_cells = view.shape
    try:
        cells = np.asarray(victims)
    except Exception as error:  # ragged, or an object whose own conversion fails
        raise PolicyError(f"victims are no array: {in_short(error)}", policy=policy.name) from error
    if not np.issubdtype(cells.dtype, np.integer):
        raise PolicyError(f"victims are {cells.dtype}: they must be integers", policy=policy.name)
    if cells.shape != (n_layer, n_head_kv, n):
        raise PolicyError(
            f"victims have shape {list(cells.shape)}: it must be [n_layer, n_head_kv, n] = "
            f"{[n_layer, n_head_kv, n]}",
            policy=policy.name,
        )
    _refuse(policy, cells, (cells < 0) | (cells >= n_cells), f"is outside the cache of {n_cells} cells")
    evictable = view.evictable(policy.n_sink, policy.n_recent, cells)
    if not evictable.all():
        _refuse(policy, cells, np.take_along_axis(view.pos, cells, axis=-1) < 0, "is empty")
        _refuse(policy, cells, ~evictable, "is a sink, pinned or recent")
    in_order = np.sort(cells, axis=-1)
    _refuse(policy, in_order[..., 1:], in_order[..., 1:] == in_order[..., :-1], "is named twice")
    return np.ascontiguousarray(cells, np.int32)


def _refuse(policy: Policy, cells: NDArray[Any], wrong: NDArray[np.bool_], why: str) -> None:
    if wrong.any():
        il, ih, i = np.argwhere(wrong)[0]
        raise PolicyError(
            f"victim {cells[il, ih, i]} of layer row {il}, KV head {ih} {why} "
            f"({np.count_nonzero(wrong)} such victims in all)",
            policy=policy.name,
        )


def _refuse_too_few(view: CacheView, n: int, policy: Policy) -> None:
    n_evictable = np.count_nonzero(view.evictable(policy.n_sink, policy.n_recent), axis=-1)
    if n_evictable.min() >= n:
        return
    il, ih = np.unravel_index(int(n_evictable.argmin()), n_evictable.shape)
    fewest = int(n_evictable[il, ih])
    used = view.pos[il, ih] >= 0
    is_sink = used & (view.pos[il, ih] < policy.n_sink)
    is_pinned = view.pinned()[il, ih] & ~is_sink
    n_used, n_sink, n_pinned = (int(np.count_nonzero(mask)) for mask in (used, is_sink, is_pinned))
    n_recent = n_used - fewest - n_sink - n_pinned
    raise BudgetError(
        f"{n} entries must go from every KV head, but only {fewest} of {n_used} may: {n_sink} are sinks, "
        f"{n_pinned} pinned, {n_recent} recent; raise the budget (kv_budget, {policy.budget}) by "
        f"{n - fewest} or more, or protect less",
        budget=policy.budget,
        n_sink=n_sink,
        n_recent=n_recent,
        n_pinned=n_pinned,
    )
