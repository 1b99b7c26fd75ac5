"""`h2o-gguf inspect`: can this model be evicted from, and what does its cache weigh."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from h2o_gguf import models
from h2o_gguf.cli.attic import AtticFlag, LimitFlag, TypeFlag
from h2o_gguf.cli.guard import guarded
from h2o_gguf.cli.opening import model_path
from h2o_gguf.cli.options import CacheFlags, KeyType, LayerBudgetsFlag, ValueType
from h2o_gguf.cli.render import as_flags, layer_classes, show_bytes
from h2o_gguf.cli.weighing import BUDGET, AtticWeight, Weight, weigh, weigh_attic
from h2o_gguf.host_memory import available_bytes
from h2o_gguf.layer_budgets import read_layer_budgets
from h2o_gguf.models import ModelShape, Support

__all__ = ["inspect"]


@guarded
def inspect(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            envvar="LLAMA_ARG_MODEL",
            metavar="[MODEL]",
            show_default="the default model",
            help="GGUF file or catalog name.",
        ),
    ] = None,
    kv_budget: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--kv-budget",
            "--max-kv-size",
            envvar="H2O_GGUF_KV_BUDGET",
            metavar="N",
            min=1,
            show_default=f"{BUDGET}, or what the model allows",
            help="Entries per KV head to weigh.",
        ),
    ] = None,
    layer_budgets: LayerBudgetsFlag = None,
    ctx_size: Annotated[
        int,
        typer.Option(
            "--ctx-size",
            "-c",
            envvar="LLAMA_ARG_CTX_SIZE",
            metavar="N",
            min=0,
            help="Context, as for run; the full cache to compare with; 0: the model's.",
        ),
    ] = 0,
    ubatch_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--ubatch-size",
            "-ub",
            envvar="LLAMA_ARG_UBATCH",
            metavar="N",
            min=1,
            show_default="512, less beside a small budget",
            help="Tokens computed at once.",
        ),
    ] = None,
    cache_type_k: KeyType = "f16",
    cache_type_v: ValueType = "f16",
    attic: AtticFlag = None,
    attic_limit: LimitFlag = None,
    attic_type: TypeFlag = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks of errors.")] = False,
) -> None:
    """Say whether entries can be evicted from a model's cache, why not, and what the cache weighs.

    Only the file's header is read.
    """
    path = model_path(model)
    shape = models.read_shape(path)
    verdict = models.support(shape)
    budgets = None if layer_budgets is None else read_layer_budgets(layer_budgets, str(path))
    weight = weigh(shape, kv_budget, ctx_size, ubatch_size, cache_type_k, cache_type_v, budgets)
    flags = CacheFlags(
        attic=attic, attic_limit=attic_limit, attic_type=attic_type,
        cache_type_k=cache_type_k, cache_type_v=cache_type_v,
    )  # fmt: skip
    why_never = "" if verdict.can_evict else f"there is nothing to keep: {verdict.reason}"
    loft = weigh_attic(shape, flags, why_never)
    if as_json:
        facts = _facts(path, shape, verdict, weight) | {"attic": loft and asdict(loft)}
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
        return
    lines = _lines(path, shape, verdict, weight)
    if loft is not None:
        lines.append(_attic_line(loft))
    for name, value in lines:
        typer.echo(f"{name:<12} {value}".rstrip())


def _facts(path: Path, shape: ModelShape, verdict: Support, weight: Weight) -> dict[str, Any]:
    return {
        "path": str(path),
        "architecture": shape.architecture,
        "name": shape.name,
        "file_type": shape.file_type,
        "file_bytes": shape.n_file_bytes,
        "can_evict": verdict.can_evict,
        "reason": verdict.reason,
        "notes": list(verdict.notes),
        "can_renumber": verdict.can_renumber,
        "n_pos_max": verdict.n_pos_max,
        "n_layer": shape.n_layer,
        "evicted_layers": list(verdict.evicted_layers),
        "n_head": list(shape.n_head),
        "n_head_kv": list(shape.n_head_kv),
        "head_dim_k": shape.head_dim_k,
        "head_dim_v": shape.head_dim_v,
        "n_swa": shape.n_swa,
        "n_ctx_train": shape.n_ctx_train,
        "rope": shape.rope,
        "has_chat_template": shape.has_chat_template,
        "kv": {
            "type_k": weight.type_k,
            "type_v": weight.type_v,
            "budget": weight.budget,
            "layer_budgets": list(weight.layer_budgets),
            "n_cells": weight.n_cells,
            "budget_bytes": weight.budget_bytes,
            "problem": as_flags(weight.problem),
            "n_ctx": weight.n_ctx,
            "full_bytes": weight.full_bytes,
        },
    }


def _lines(path: Path, shape: ModelShape, verdict: Support, weight: Weight) -> list[tuple[str, str]]:
    heads = f"{_few(shape.n_head)} heads, {_few(shape.n_head_kv)} KV heads"
    dims = (
        str(shape.head_dim_k)
        if shape.head_dim_k == shape.head_dim_v
        else f"{shape.head_dim_k}/{shape.head_dim_v}"
    )
    lines = [
        (
            "model",
            f"{shape.name or path.name} ({shape.architecture}, {shape.file_type}, "
            f"{show_bytes(shape.n_file_bytes)})",
        ),
        ("evict", "yes" if verdict.can_evict else f"no: {verdict.reason}"),
        *(("", note) for note in verdict.notes),
        ("layers", f"{shape.n_layer}, {len(verdict.evicted_layers)} of them evicted from"),
        (
            "attention",
            f"{heads}, head size {dims}" + (f", sliding window {shape.n_swa:,}" if shape.n_swa else ""),
        ),
        (
            "context",
            f"{shape.n_ctx_train:,} tokens trained"
            + (
                ", without end when entries are evicted" if verdict.can_evict and verdict.can_renumber else ""
            ),
        ),
        (
            "chat",
            "has its own chat template" if shape.has_chat_template else "no chat template (a base model?)",
        ),
    ]
    types = (
        weight.type_k if weight.type_k == weight.type_v else f"{weight.type_k} keys, {weight.type_v} values"
    )
    share = ""
    if weight.budget_bytes is not None:
        lines.append(
            (
                "KV bounded",
                f"{weight.budget_bytes:,} bytes ({show_bytes(weight.budget_bytes)}), {types}, "
                f"budget {weight.budget:,}, {weight.n_cells:,} cells",
            )
        )
        if weight.layer_budgets:
            lines[-1] = (lines[-1][0], f"{lines[-1][1]}, on average")
            lines.append(("", layer_classes(weight.layer_budgets)))
        if weight.full_bytes:
            share = f"; bounded is {weight.budget_bytes / weight.full_bytes:.0%} of it"
    elif weight.problem:
        lines.append(("KV bounded", f"refused: {as_flags(weight.problem)}"))
    lines.append(
        (
            "KV full",
            f"{weight.full_bytes:,} bytes ({show_bytes(weight.full_bytes)}) at context {weight.n_ctx:,}"
            + share,
        )
    )
    return lines


def _attic_line(attic: AtticWeight) -> tuple[str, str]:
    grows = "grows in memory" if attic.place == "ram" else "grows in a file"
    n_available = available_bytes() if attic.place == "ram" else None
    short = ""
    if n_available is not None and n_available < attic.limit:
        short = f"; {show_bytes(n_available)} are available now"
    return "attic", (
        f"{grows} to {show_bytes(attic.limit)} at most, {attic.token_bytes:,} bytes for each evicted token: "
        f"room for {attic.n_tokens:,}{short}"
    )


def _few(values: tuple[int, ...]) -> str:
    """One number, or a range where layers differ."""
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low} to {high}"
