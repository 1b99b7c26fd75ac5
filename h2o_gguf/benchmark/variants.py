"""The ways to run a model that are compared, and what a worker needs to know of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o_gguf.bindings.library import FILE
from h2o_gguf.cache_options import CacheOptions
from h2o_gguf.checked import checked
from h2o_gguf.errors import BudgetError, OptionError, OutOfMemoryError
from h2o_gguf.host_memory import available_bytes
from h2o_gguf.models import ModelShape, kv_bytes, support
from h2o_gguf.models.memory import CACHE_TYPES, pad_cells
from h2o_gguf.options import KV_TYPES, BatchSize, Threads
from h2o_gguf.sizes import N_BATCH, plan_model_sizes

__all__ = [
    "BURST",
    "EVICTIONS",
    "SHORT",
    "Plan",
    "Settings",
    "Variant",
    "fitting_histories",
    "make_plan",
    "require_memory",
    "variants",
]

SHORT = 64  # tokens of history whose attention counts as nothing
BURST = 6  # tokens written in one turn
EVICTIONS = 3  # timed, of a block each
HISTORIES = (200, 1536, 4096, 7500)
SHARES = (0.2, 0.1)
POLICY, POLICY_WITHOUT_SCORES = "h2o+", "streaming"


@checked
@dataclass(frozen=True)
class Settings:
    """What is compared.

    histories : tokens, more than 64; none: those of 200, 1536, 4096 and 7500 that the model's context holds.
    shares : budgets, as shares of the history, above 0 and below 1; those that are written alike are one.
    repeats : of each measurement, >= 1. n_threads : 0: physical cores. n_ubatch : None: what H2OLlama takes.
    type_k, type_v : of the cache, by name.
    stock : folder of an unmodified libllama of the same version; None: this runtime with nothing attached.
    scores_off : also the first share without scores, or the full cache if there is no share.

    Raises: OptionError.
    """

    histories: tuple[int, ...] = ()
    shares: tuple[float, ...] = SHARES
    repeats: int = 9
    n_threads: Threads = 0
    n_ubatch: BatchSize | None = None
    type_k: str = "f16"
    type_v: str = "f16"
    stock: Path | None = None
    scores_off: bool = False

    def __post_init__(self) -> None:
        for share in self.shares:
            if not 0 < share < 1:
                raise OptionError(f"a budget share of {share} must be above 0 and below 1", "shares")
        for n in self.histories:
            if n <= SHORT:
                raise OptionError(f"a history of {n} tokens is too short: more than {SHORT}", "histories")
        for name in ("type_k", "type_v"):
            if (value := getattr(self, name)) not in CACHE_TYPES:
                raise OptionError(f"{name} is {value!r}: a cache can be {', '.join(CACHE_TYPES)}", name)
        if self.repeats < 1:
            raise OptionError(f"{self.repeats} repetitions measure nothing: 1 or more", "repeats")
        if self.stock is not None and not (self.stock / FILE).is_file():
            raise OptionError(
                f"{self.stock} has no {FILE}: name the folder of a shared build of llama.cpp, "
                "or leave it out to compare with this runtime, hooks off",
                "stock",
            )


@dataclass(frozen=True)
class Variant:
    """One way.

    share : of the history, its budget; None: everything is kept. is_ours : our cache is attached. is_scored :
    attention is summed.
    """

    name: str
    share: float | None = None
    is_ours: bool = True
    is_scored: bool = True


@dataclass(frozen=True)
class Plan:
    """A variant at one history: its numbers, and the job of its worker.  kv_bytes : of its whole cache."""

    variant: Variant
    budget: int | None
    block: int
    n_cells: int
    n_ubatch: int
    kv_bytes: int
    job: dict[str, Any]


def variants(settings: Settings) -> tuple[Variant, ...]:
    """All that are compared; the one to compare with first."""
    stock = "llama.cpp" if settings.stock is not None else "hooks off"
    shares = {f"ours, {100 * share:g} %": share for share in settings.shares}
    ours = [Variant("ours, full"), *(Variant(name, share) for name, share in shares.items())]
    without = [Variant(f"{v.name}, no scores", v.share, is_scored=False) for v in (*ours[1:], ours[0])[:1]]
    return Variant(stock, is_ours=False), *ours, *(without if settings.scores_off else [])


def fitting_histories(settings: Settings, shape: ModelShape) -> tuple[int, ...]:
    """The histories to measure.  Raises: OptionError, the model's context is too short."""
    most = shape.n_ctx_train - BURST
    verdict = support(shape)
    if verdict.can_evict and not verdict.can_renumber:  # evictions are timed beyond the history
        most -= (EVICTIONS + 1) * CacheOptions.kv_block
    chosen = settings.histories or tuple(n for n in HISTORIES if n <= most)
    if not chosen or max(chosen) > most:
        asked = max(settings.histories or HISTORIES[:1])
        raise OptionError(
            f"a history of {asked} tokens and what is measured after it do not fit into the model's context "
            f"of {shape.n_ctx_train}: the longest is {most}",
            "histories",
        )
    return chosen


def make_plan(variant: Variant, n: int, model: str, shape: ModelShape, settings: Settings) -> Plan:
    """What a history of n tokens takes, as H2OLlama plans it.

    Raises: UnsupportedModelError, BudgetError; OptionError, the share is smaller than what is protected, or
        the model cannot have such a cache.
    """
    from h2o_gguf import loading
    from h2o_gguf.native import high

    cache: dict[str, Any] | None = None
    if variant.share is None:
        budget, block = None, 0
        n_ubatch = settings.n_ubatch or N_BATCH
        # Recurrent states cannot forget what a burst wrote; a window and a batch must fit beside each other.
        n_cells = pad_cells(max(n + BURST * settings.repeats, shape.n_swa and shape.n_swa + n_ubatch))
        if variant.is_ours:
            cache = {"budget": None, "is_scored": variant.is_scored}
    else:
        budget = max(1, round(variant.share * n))
        try:
            sizes = plan_model_sizes(CacheOptions(kv_budget=budget, n_ubatch=settings.n_ubatch), shape)
        except BudgetError as error:
            if error.n_protected <= budget:
                raise
            raise OptionError(
                f"a share of {variant.share:g} of {n} tokens is a budget of {budget}, less than the "
                f"{error.n_protected} entries per KV head that are protected: choose a larger share",
                "shares",
            ) from error
        block, n_cells, n_ubatch = sizes.block, sizes.n_cells, sizes.n_ubatch
        policy = POLICY if variant.is_scored else POLICY_WITHOUT_SCORES
        cache = {"budget": budget, "policy": policy, "block": block, "n_pos_max": sizes.n_pos_max}
    is_other = settings.stock is not None and not variant.is_ours
    job = {
        "model": model,
        "n_cells": n_cells,
        "n_ubatch": n_ubatch,
        "n_threads": settings.n_threads or loading.default_threads(),
        "type_k": KV_TYPES[settings.type_k],
        "type_v": KV_TYPES[settings.type_v],
        "library": str(settings.stock) if is_other else None,
        "python_path": str(Path(high.__file__).parent.parent),
        "cache": cache,
    }
    n_bytes = kv_bytes(shape, n_cells, n_ubatch, settings.type_k, settings.type_v)
    return Plan(variant, budget, block, n_cells, n_ubatch, n_bytes, job)


def require_memory(n: int, plans: Sequence[Plan]) -> None:
    """Refuse plans for a history of n tokens whose caches, all allocated at once, would end a process.

    Raises: OutOfMemoryError.
    """
    n_bytes, n_available = sum(plan.kv_bytes for plan in plans), available_bytes()
    if n_available is not None and n_bytes > n_available:
        raise OutOfMemoryError(
            f"the {len(plans)} caches that are compared at a history of {n:,} tokens take {n_bytes:,} bytes "
            f"and {n_available:,} are available: choose shorter histories or fewer repetitions",
            n_bytes=n_bytes,
            n_available=n_available,
        )
