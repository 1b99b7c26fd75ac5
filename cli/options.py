"""The options that commands share. llama.cpp's letters, names and environment variables where it has them.

Annotations here are evaluated by typer, so optional ones are written `Optional[...]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Optional

import typer

from h2o_gguf.cli.attic import AtticFlag, LimitFlag, RecallFlag, TypeFlag
from h2o_gguf.cli.flags import mark_environment
from h2o_gguf.models import memory

__all__ = ["CacheFlags", "KeyType", "LayerBudgetsFlag", "ModelFlags", "SamplingFlags", "ValueType"]

KeyType = Annotated[
    str,
    typer.Option(
        "--cache-type-k",
        "-ctk",
        envvar="LLAMA_ARG_CACHE_TYPE_K",
        metavar="TYPE",
        help=f"Type of the keys: {', '.join(memory.CACHE_TYPES)}.",
    ),
]
ValueType = Annotated[
    str,
    typer.Option(
        "--cache-type-v",
        "-ctv",
        envvar="LLAMA_ARG_CACHE_TYPE_V",
        metavar="TYPE",
        help="Type of the values.",
    ),
]

LayerBudgetsFlag = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--layer-budgets",
        metavar="pyramid[:BETA]|FILE|N,N,...",
        show_default="the same in all layers",
        help="How --kv-budget is split over the layers: falling from the first to the last, or as "
        "`h2o-gguf calibrate` found it and wrote it to FILE. Or a budget for each layer.",
    ),
]


@dataclass(frozen=True)
class ModelFlags:
    """Which model, and how it is loaded."""

    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--model", "-m", envvar="LLAMA_ARG_MODEL", metavar="FILE", show_default=False,
            help="GGUF file, or a name from `h2o-gguf models list`. Without it: the default model.",
        ),
    ] = None  # fmt: skip
    ctx_size: Annotated[
        int,
        typer.Option(
            "--ctx-size", "-c", envvar="LLAMA_ARG_CTX_SIZE", metavar="N", min=0,
            help="Context in tokens before positions are renumbered; 0: what the model was trained for.",
        ),
    ] = 0  # fmt: skip
    batch_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--batch-size", "-b", envvar="LLAMA_ARG_BATCH", metavar="N", min=1, show_default="512",
            help="Tokens computed at once while reading.",
        ),
    ] = None  # fmt: skip
    ubatch_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--ubatch-size", "-ub", envvar="LLAMA_ARG_UBATCH", metavar="N", min=1, show_default=False,
            help="The same; the smaller of the two counts.",
        ),
    ] = None  # fmt: skip
    threads: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--threads", "-t", envvar="LLAMA_ARG_THREADS", metavar="N", show_default="physical cores",
            help="Threads to compute with.",
        ),
    ] = None  # fmt: skip
    gpu_layers: Annotated[
        int,
        typer.Option(
            "--gpu-layers", "-ngl", envvar="LLAMA_ARG_N_GPU_LAYERS", metavar="N", min=-1,
            help="Layers to put on the GPU; -1: all.",
        ),
    ] = 0  # fmt: skip
    flash_attn: Annotated[
        str,
        typer.Option(
            "--flash-attn",
            "-fa",
            envvar="LLAMA_ARG_FLASH_ATTN",
            metavar="on|off|auto",
            help="Flash attention.",
        ),
    ] = "auto"
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose", "-v", count=True, metavar="", show_default=False,
            help="Show speeds, the native log, and tracebacks of errors; -vv: the native log in full.",
        ),
    ] = 0  # fmt: skip


@dataclass(frozen=True)
class CacheFlags:
    """How large the KV cache is, what leaves it, and where that stays."""

    kv_budget: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--kv-budget", "--max-kv-size", envvar="H2O_GGUF_KV_BUDGET", metavar="N", min=1,
            show_default=False, callback=mark_environment, help="Entries kept per KV head after an eviction.",
        ),
    ] = None  # fmt: skip
    policy: Annotated[
        str,
        typer.Option(
            "--policy", envvar="H2O_GGUF_POLICY", metavar="NAME", callback=mark_environment,
            help="What to evict: h2o+, h2o, streaming, random, tova, snapkv, pyramidkv, keydiff, knorm, "
            "expected-attention, dropkv, scissorhands, hcattention, r-kv, lazy, staged (snapkv, then h2o+), "
            "the policy of an installed package, or none (a full cache is an error).",
        ),
    ] = "h2o+"  # fmt: skip
    layer_budgets: LayerBudgetsFlag = None
    sink: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--kv-evict-sink", metavar="N", min=0, show_default="the policy's",
            help="First tokens that are always kept.",
        ),
    ] = None  # fmt: skip
    window: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--kv-evict-window", metavar="N", min=1, show_default="the policy's",
            help="Newest tokens that are always kept.",
        ),
    ] = None  # fmt: skip
    pin: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--pin",
            metavar="FROM:TO",
            show_default="the system message",
            help="Positions, FROM up to TO, that are never evicted either; may be given again.",
        ),
    ] = None
    cache_type_k: KeyType = "f16"
    cache_type_v: ValueType = "f16"
    attic: AtticFlag = None
    attic_limit: LimitFlag = None
    attic_type: TypeFlag = None
    recall_every: RecallFlag = None


@dataclass(frozen=True)
class SamplingFlags:
    """How the next token is chosen."""

    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--seed", "-s", envvar="LLAMA_ARG_SEED", metavar="N", show_default="random",
            help="Seed of the random numbers.",
        ),
    ] = None  # fmt: skip
    temp: Annotated[
        float,
        typer.Option(
            "--temp", "--temperature", envvar="LLAMA_ARG_TEMPERATURE", metavar="X", min=0.0,
            help="Temperature; 0 always takes the likeliest token.",
        ),
    ] = 0.8  # fmt: skip
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k", envvar="LLAMA_ARG_TOP_K", metavar="N", min=0,
            help="Only the N likeliest tokens; 0: all.",
        ),
    ] = 40  # fmt: skip
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p", envvar="LLAMA_ARG_TOP_P", metavar="X", min=0.0, max=1.0,
            help="Only the likeliest tokens that sum to X.",
        ),
    ] = 0.95  # fmt: skip
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p", envvar="LLAMA_ARG_MIN_P", metavar="X", min=0.0, max=1.0,
            help="Only tokens at least X times as likely as the likeliest.",
        ),
    ] = 0.05  # fmt: skip
    repeat_penalty: Annotated[
        float,
        typer.Option(
            "--repeat-penalty", envvar="LLAMA_ARG_REPEAT_PENALTY", metavar="X", min=0.01,
            help="Makes repetition of the last 64 tokens less likely; 1: off.",
        ),
    ] = 1.0  # fmt: skip
    predict: Annotated[
        int,
        typer.Option(
            "--predict", "-n", envvar="LLAMA_ARG_N_PREDICT", metavar="N", min=-1,
            help="Most tokens to write; -1: until the model ends, or as many as it was trained to see.",
        ),
    ] = -1  # fmt: skip
