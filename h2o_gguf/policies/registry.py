"""Policies by name: ours, and those other packages bring."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from h2o_gguf.errors import OptionError, PolicyError, in_short
from h2o_gguf.policies.base import Policy, as_policy
from h2o_gguf.policies.dropkv import DropKV
from h2o_gguf.policies.expected_attention import ExpectedAttention
from h2o_gguf.policies.h2o import H2O
from h2o_gguf.policies.h2o_plus import H2OPlus
from h2o_gguf.policies.hcattention import HCAttention
from h2o_gguf.policies.keydiff import KeyDiff
from h2o_gguf.policies.knorm import KNorm
from h2o_gguf.policies.lazy import Lazy
from h2o_gguf.policies.none import NoEviction
from h2o_gguf.policies.pyramidkv import KEEPS as PYRAMIDKV_KEEPS
from h2o_gguf.policies.pyramidkv import NAME as PYRAMIDKV
from h2o_gguf.policies.pyramidkv import pyramidkv
from h2o_gguf.policies.random import Random
from h2o_gguf.policies.rkv import RKV
from h2o_gguf.policies.scissorhands import Scissorhands
from h2o_gguf.policies.snapkv import SnapKV
from h2o_gguf.policies.staged import Staged, snapkv_then_h2o_plus
from h2o_gguf.policies.streaming import Streaming
from h2o_gguf.policies.tova import TOVA

__all__ = ["GROUP", "get", "keeps", "known_as", "make", "names"]

GROUP = "h2o_gguf.policies"  # the entry point group other packages name their policies in

CLASSES = (
    H2OPlus,
    H2O,
    Streaming,
    Random,
    TOVA,
    SnapKV,
    KeyDiff,
    KNorm,
    ExpectedAttention,
    DropKV,
    Scissorhands,
    HCAttention,
    RKV,
    Lazy,
    Staged,
)
OURS: dict[str, Callable[..., Policy]] = {policy.name: policy for policy in CLASSES} | {
    PYRAMIDKV: pyramidkv,
    Staged.name: snapkv_then_h2o_plus,
    NoEviction.name: NoEviction,
}
KEEPS = {policy.name: policy.keeps for policy in (*CLASSES, NoEviction)} | {PYRAMIDKV: PYRAMIDKV_KEEPS}
ALIASES = {"h2o-plus": "h2o+", "h2oplus": "h2o+", "rkv": "r-kv"}


def names() -> list[str]:
    """Return the names get knows: ours, the default first, then those of other packages."""
    return [*OURS, *sorted(_theirs().keys() - OURS.keys())]


def keeps(name: str) -> str:
    """Return in a few words what the policy of that name keeps, to stand after "keeps n entries, "."""
    return KEEPS.get(name, "which it chooses")


def known_as(name: str) -> str:
    """Return the name as names has it: upper case and "_" for "-" are allowed, "h2o-plus" is "h2o+"."""
    key = str(name).strip().lower().replace("_", "-")
    return ALIASES.get(key, key)


def get(name: str) -> Callable[..., Policy]:
    """Return the class behind a name that known_as understands.

    Raises: OptionError, the name is unknown. PolicyError, another package's policy cannot be imported.
    """
    key = known_as(name)
    if key in OURS:
        return OURS[key]
    theirs = _theirs()
    if key not in theirs:
        close = difflib.get_close_matches(key, names(), n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise OptionError(f"no policy is called {name!r}: {hint}there are {', '.join(names())}", "policy")
    try:
        found: Callable[..., Policy] = theirs[key].load()
    except Exception as error:
        raise PolicyError(f"cannot import {theirs[key].value}: {in_short(error)}", policy=key) from error
    return found


def make(name: str, budget: int, **knobs: Any) -> Policy:
    """Return the policy of that name with these knobs.

    budget : entries per KV head, >= 1. knobs : what the class takes.

    Raises: OptionError, the name or a knob is unknown. BudgetError, the numbers are illegal. PolicyError,
        another package's policy cannot be made.
    """
    policy = get(name)
    accepted = inspect.signature(policy).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    unknown = [] if takes_any else [knob for knob in knobs if knob not in accepted]
    if unknown:
        raise OptionError(
            f"policy {name!r} has no {', '.join(unknown)}: it takes {', '.join(accepted)}", *unknown
        )
    return as_policy(policy(budget=budget, **knobs))


def _theirs() -> dict[str, EntryPoint]:
    return {known_as(point.name): point for point in entry_points(group=GROUP)}
