"""From flags to a loaded model."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from h2o_gguf import models, policies
from h2o_gguf.cli.aborts import explained_aborts
from h2o_gguf.cli.attic import attic_options
from h2o_gguf.cli.fetching import fetch_with_bar
from h2o_gguf.cli.flags import FromEnvironment
from h2o_gguf.cli.leaving import leaving_at_interrupt
from h2o_gguf.cli.options import CacheFlags, ModelFlags
from h2o_gguf.cli.render import is_terminal, notice, show_bytes
from h2o_gguf.errors import INTERRUPTED, ModelFileError, OptionError
from h2o_gguf.models.catalog import DEFAULT_MODEL, entry
from h2o_gguf.policies import LayerBudgets

if TYPE_CHECKING:
    from h2o_gguf.llama import H2OLlama

__all__ = ["model_path", "open_model", "pinned_spans"]

NO_POLICY = "none"
ROOM = 512  # a batch beside the budget


def model_path(name: str | None) -> Path:
    """The model's file; a person at a terminal is offered the default model if it is not here yet.

    Raises: ModelFileError, with the command that fetches it.
    """
    if name is not None:
        return models.resolve(name)
    try:
        return models.resolve()
    except ModelFileError as error:
        model = entry(DEFAULT_MODEL)
        if not (sys.stdin.isatty() and is_terminal()):
            raise ModelFileError(
                DEFAULT_MODEL,
                "it is the default model and not here yet; fetch it with: h2o-gguf models fetch; "
                "or name a GGUF file with -m FILE",
            ) from error
        notice(f"No model is named and the default one, {model.title}, is not here yet.")
        question = f"Fetch it ({show_bytes(model.n_bytes)}, {model.licence})?"
        try:
            if not typer.confirm(question, default=True, err=True):
                raise typer.Exit(error.exit_code) from None
        except typer.Abort:
            raise typer.Exit(INTERRUPTED) from None
        return fetch_with_bar(DEFAULT_MODEL)


def open_model(model: ModelFlags, cache: CacheFlags, default_budget: int) -> H2OLlama:
    """Load the model.  default_budget : entries per KV head when the user names none and the model allows it.

    Raises: what H2OLlama raises.
    """
    pinned_spans(cache)
    path = model_path(model.model)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("h2o_gguf.native").setLevel(logging.INFO if model.verbose == 1 else logging.ERROR)
    policy, budget = _policy_and_budget(cache)
    if budget is None and policy != NO_POLICY and cache.layer_budgets is None:
        budget = _default_budget(path, model, policy, default_budget)
    attic = attic_options(cache, _why_never(path, policy))
    with leaving_at_interrupt(), explained_aborts(path):
        from h2o_gguf.llama import H2OLlama

        return H2OLlama(
            path,
            policy=policy,
            kv_budget=budget,
            layer_budgets=cache.layer_budgets,
            n_sink=cache.sink,
            n_recent=cache.window,
            n_ctx=model.ctx_size,
            n_batch=model.batch_size,
            n_ubatch=model.ubatch_size,
            n_threads=model.threads,
            n_gpu_layers=model.gpu_layers,
            flash_attn=_is_on(model.flash_attn),
            type_k=cache.cache_type_k,
            type_v=cache.cache_type_v,
            **attic,
            verbose=model.verbose > 1,
        )


def pinned_spans(cache: CacheFlags) -> list[tuple[int, int]]:
    """The spans of --pin.  Raises: OptionError, one is no span."""
    return [span for text in cache.pin or () if (span := _span(text)) is not None]


def _span(text: str) -> tuple[int, int] | None:
    if text == "system":  # the Python API's word for what is pinned here in any case
        return None
    start, _, end = text.partition(":")
    if not (start.isdecimal() and end.isdecimal() and int(start) < int(end)):
        raise OptionError(f"--pin is {text!r}: it must be FROM:TO, such as 0:40", "pin")
    return int(start), int(end)


def _policy_and_budget(cache: CacheFlags) -> tuple[str, int | None]:
    """The two; where one is a flag and the environment's other contradicts it, what the flag says."""
    policy, budget = cache.policy, cache.kv_budget
    if policy.strip().lower() != NO_POLICY:
        return policy, budget
    flags = {
        "--kv-budget": budget,
        "--layer-budgets": cache.layer_budgets,
        "--kv-evict-sink": cache.sink,
        "--kv-evict-window": cache.window,
    }
    given = [n for n, v in flags.items() if v is not None and not isinstance(v, FromEnvironment)]
    if given and isinstance(policy, FromEnvironment):
        policy = CacheFlags.policy
        notice(f"$H2O_GGUF_POLICY is none, which does not count with {given[0]}: the policy is {policy}")
        return policy, budget
    if isinstance(budget, FromEnvironment):
        notice(f"$H2O_GGUF_KV_BUDGET is {budget}, which does not count with policy none")
        budget = None
    return NO_POLICY, budget


def _why_never(path: Path, policy: str) -> str:
    """Why nothing is ever evicted; "" where it is."""
    if policy == NO_POLICY:
        return "policy none evicts nothing"
    verdict = models.support(models.read_shape(path))
    return "" if verdict.can_evict else f"this model cannot be evicted from ({verdict.reason})"


def _default_budget(path: Path, model: ModelFlags, policy: str, budget: int) -> int | None:
    """The budget, or None, the library's choice, where it or the model does not allow that much."""
    shape = models.read_shape(path)
    verdict = models.support(shape)
    n_ctx = model.ctx_size or shape.n_ctx_train
    room = min((n for n in (model.batch_size, model.ubatch_size) if n is not None), default=ROOM)
    if not verdict.can_evict:
        return None
    made = policies.make(policy, budget)
    if isinstance(made, LayerBudgets):  # whose largest must fit
        made = made.for_layers(verdict.evicted_layers)
    return budget if made.budget + room <= min(n_ctx, verdict.n_pos_max) else None


def _is_on(value: str) -> bool:
    word = value.strip().lower()
    if word in ("on", "auto", "1", "true", "yes", "enabled"):
        return True
    if word in ("off", "0", "false", "no", "disabled"):
        return False
    raise OptionError(f"--flash-attn is {value!r}: it can be on, off or auto", "flash-attn")
