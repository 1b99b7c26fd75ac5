"""Ways to keep a cache, and the controls that belong beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from h2o_gguf import policies
from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.layer_budgets import read_layer_budgets
from h2o_gguf.options import KV_TYPES
from h2o_gguf.policies import LayerBudgets, Policy

__all__ = ["AUTO", "FULL", "PLAIN", "Variant", "compared", "with_attics", "with_controls"]

FULL = "none"  # the policy that keeps everything
STREAMING, RANDOM = "streaming", "random"
DEFAULT = "h2o+"
AUTO = -1  # a number of tokens that is left to the attic
PLAIN = "f16"  # type of keys and values unless another is named


@dataclass(frozen=True, order=True)
class Variant:
    """One way to keep a cache.

    policy : its name. like : name of the policy whose sinks and recent window it has; "": its own.
    type_k, type_v : of the cache. layers : how its budget is split over the layers, as read_layer_budgets
    takes it; "": it is the same in all, or the policy's own split. attic : what it evicts stays on the host
    and is recalled. recall_every : after so many generated tokens too; 0: only by what is read; AUTO: as
    often as costs little, and while reading not at all.
    """

    policy: str
    like: str = ""
    type_k: str = PLAIN
    type_v: str = PLAIN
    layers: str = ""
    attic: bool = False
    recall_every: int = AUTO

    @property
    def name(self) -> str:
        """How reports call it."""
        name = f"{self.policy} like {self.like}" if self.like else self.policy
        name += f" by {self.layers}" if self.layers else ""
        name += " with attic" if self.attic else ""
        name += f" every {self.recall_every}" if self.attic and self.recall_every != AUTO else ""
        types = dict.fromkeys((self.type_k, self.type_v))
        return name if list(types) == [PLAIN] else f"{name}, {'/'.join(types)}"

    @property
    def is_full(self) -> bool:
        """Whether it keeps everything."""
        return self.policy == FULL

    @property
    def is_reference(self) -> bool:
        """Whether it is what all others are compared with: everything, as f16."""
        return self == Variant(FULL)

    @property
    def is_control(self) -> bool:
        """Whether it is there to be beaten."""
        return self.policy == RANDOM

    def make(self, budget: int) -> Policy:
        """The policy at a budget; the full cache is one that is never reached.

        Raises: OptionError, BudgetError, PolicyError.
        """
        if self.is_full:
            return policies.make(STREAMING, budget)  # needs no scores
        if self.layers:
            split = read_layer_budgets(self.layers)
            return LayerBudgets(split if isinstance(split, tuple) else split(budget), self.policy)
        if not self.like:
            return policies.make(self.policy, budget)
        model = policies.make(self.like, budget)
        return policies.make(self.policy, budget, n_sink=model.n_sink, n_recent=model.n_recent)


def with_controls(names: Sequence[str], budgets: Iterable[int], splits: Sequence[str] = ()) -> list[Variant]:
    """The policies, streaming, and random with each different set of sinks and recent window among them.

    splits : over the layers, in which the policies come again.

    Raises: OptionError, BudgetError, PolicyError: a policy is unknown or cannot be made at a budget.
    """
    known = dict.fromkeys(policies.known_as(name) for name in (*names, STREAMING))
    made = {name: [_make(name, budget) for budget in sorted(set(budgets))] for name in known}
    chosen = {name: each for name, each in made.items() if name != FULL}
    windows: dict[tuple[tuple[int, int], ...], str] = {}
    for name, each in chosen.items():
        if name not in (STREAMING, RANDOM):
            windows.setdefault(tuple((policy.n_sink, policy.n_recent) for policy in each), name)
    found = [Variant(name) for name in chosen if name != RANDOM]
    found += [
        Variant(name, layers=split)
        for split in dict.fromkeys(splits)
        for name, each in chosen.items()
        if name not in (STREAMING, RANDOM) and not isinstance(each[0], LayerBudgets)
    ]
    return found + [Variant(RANDOM, like=name) for name in windows.values() or (DEFAULT,)]


def with_attics(variants: Sequence[Variant], recall_every: int = AUTO) -> list[Variant]:
    """The variants, each that evicts followed by itself with an attic."""
    return [
        each
        for variant in variants
        for each in (variant, replace(variant, attic=True, recall_every=recall_every))
        if not (each.attic and variant.is_full)
    ]


def _make(name: str, budget: int) -> Policy:
    try:
        return policies.make(name, budget)
    except BudgetError as error:
        if not error.n_protected:
            raise
        raise BudgetError(
            f"{budget} entries per KV head are too few for {name}, which protects {error.n_protected}: "
            "keep a larger share or more entries (--kept)",
            budget=budget,
            n_sink=error.n_sink,
            n_recent=error.n_recent,
        ) from error


def compared(
    names: Sequence[str], types: Sequence[str], budgets: Iterable[int], splits: Sequence[str] = ()
) -> list[Variant]:
    """Ways to save memory: a sliding window, cache types, the policies, and both together; and the control.

    types : of keys and values, beside f16. splits : over the layers, as with_controls takes them.

    Raises: as with_controls; OptionError, a type is unknown.
    """
    plain = with_controls(names, budgets, splits)
    policies_only = [v for v in plain if v.policy not in (STREAMING, RANDOM)]
    smaller = [replace(v, type_k=t, type_v=t) for t in _types(types) for v in (Variant(FULL), *policies_only)]
    return sorted([*plain, *smaller], key=lambda v: (v.policy == RANDOM, v.policy not in (STREAMING, FULL)))


def _types(words: Sequence[str]) -> list[str]:
    """The types behind the words, each once, without f16."""
    found = dict.fromkeys(word.strip().lower() for word in words)
    for word in found:
        if word not in KV_TYPES:
            raise OptionError(f"no cache type is called {word!r}: there are {', '.join(KV_TYPES)}", "type")
    return [word for word in found if word != PLAIN]
