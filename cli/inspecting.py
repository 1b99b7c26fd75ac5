"""`h2o-gguf inspect`: can this model be evicted from, and what does its cache weigh."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from h2o_gguf import models
from h2o_gguf.cli.guard import guarded
from h2o_gguf.cli.opening import model_path
from h2o_gguf.cli.options import CACHE_TYPES
from h2o_gguf.cli.render import show_bytes
from h2o_gguf.models import ModelShape, Support

__all__ = ["inspect"]

BUDGET = 1024
BLOCK = 64


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
        int,
        typer.Option(
            "--kv-budget",
            "--max-kv-size",
            envvar="H2O_GGUF_KV_BUDGET",
            metavar="N",
            min=1,
            help="Entries per KV head to weigh.",
        ),
    ] = BUDGET,
    ctx_size: Annotated[
        int,
        typer.Option(
            "--ctx-size",
            "-c",
            envvar="LLAMA_ARG_CTX_SIZE",
            metavar="N",
            min=0,
            help="Full context to compare with; 0: the model's.",
        ),
    ] = 0,
    ubatch_size: Annotated[
        int,
        typer.Option(
            "--ubatch-size",
            "-ub",
            envvar="LLAMA_ARG_UBATCH",
            metavar="N",
            min=1,
            help="Tokens computed at once.",
        ),
    ] = 512,
    cache_type_k: Annotated[
        str,
        typer.Option(
            "--cache-type-k",
            "-ctk",
            envvar="LLAMA_ARG_CACHE_TYPE_K",
            metavar="TYPE",
            help=f"Type of the keys: {CACHE_TYPES}.",
        ),
    ] = "f16",
    cache_type_v: Annotated[
        str,
        typer.Option(
            "--cache-type-v",
            "-ctv",
            envvar="LLAMA_ARG_CACHE_TYPE_V",
            metavar="TYPE",
            help="Type of the values.",
        ),
    ] = "f16",
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks of errors.")] = False,
) -> None:
    """Say whether entries can be evicted from a model's cache, why not, and what the cache weighs.

    Only the file's header is read.
    """
    path = model_path(model)
    shape = models.read_shape(path)
    verdict = models.support(shape)
    weight = _weigh(shape, kv_budget, ctx_size or shape.n_ctx_train, ubatch_size, cache_type_k, cache_type_v)
    if as_json:
        typer.echo(json.dumps(_facts(path, shape, verdict, weight), indent=2, ensure_ascii=False))
        return
    for name, value in _lines(path, shape, verdict, weight):
        typer.echo(f"{name:<12} {value}".rstrip())


@dataclass(frozen=True)
class _Weight:
    """KV bytes at a budget and at the full context."""

    budget: int
    n_cells: int
    budget_bytes: int
    n_ctx: int
    full_bytes: int
    type_k: str
    type_v: str


def _weigh(shape: ModelShape, budget: int, n_ctx: int, n_ubatch: int, type_k: str, type_v: str) -> _Weight:
    n_cells = models.cells_for_budget(budget, n_ubatch, BLOCK)
    return _Weight(
        budget=budget,
        n_cells=n_cells,
        budget_bytes=models.kv_bytes(shape, n_cells, n_ubatch, type_k, type_v),
        n_ctx=n_ctx,
        full_bytes=models.kv_bytes(shape, n_ctx, n_ubatch, type_k, type_v),
        type_k=type_k,
        type_v=type_v,
    )


def _facts(path: Path, shape: ModelShape, verdict: Support, weight: _Weight) -> dict[str, Any]:
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
            "n_cells": weight.n_cells,
            "budget_bytes": weight.budget_bytes,
            "n_ctx": weight.n_ctx,
            "full_bytes": weight.full_bytes,
        },
    }


def _lines(path: Path, shape: ModelShape, verdict: Support, weight: _Weight) -> list[tuple[str, str]]:
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
    if verdict.can_evict:
        lines.append(
            (
                "KV bounded",
                f"{weight.budget_bytes:,} bytes ({show_bytes(weight.budget_bytes)}), {types}, "
                f"budget {weight.budget:,}, {weight.n_cells:,} cells",
            )
        )
    share = f"; bounded is {weight.budget_bytes / weight.full_bytes:.0%} of it" if weight.full_bytes else ""
    lines.append(
        (
            "KV full",
            f"{weight.full_bytes:,} bytes ({show_bytes(weight.full_bytes)}) at context {weight.n_ctx:,}"
            + (share if verdict.can_evict else ""),
        )
    )
    return lines


def _few(values: tuple[int, ...]) -> str:
    """One number, or a range where layers differ."""
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low} to {high}"
