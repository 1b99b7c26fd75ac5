"""The options that `eval` and `compare` share.

Annotations here are evaluated by typer, so optional ones are written `Optional[...]`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

__all__ = [
    "Attic", "BatchSize", "Folder", "GpuLayers", "Json", "LayerBudgets", "Model", "Out", "RecallEvery",
    "Seed", "Text", "Threads", "Tolerance", "Verbose",
]  # fmt: skip

Model = Annotated[
    Optional[str],  # noqa: UP045
    typer.Argument(
        envvar="LLAMA_ARG_MODEL",
        metavar="[MODEL]",
        show_default="the default model",
        help="GGUF file or catalog name.",
    ),
]
LayerBudgets = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--layer-budgets",
        metavar="pyramid[:BETA]|FILE",
        show_default=False,
        help="Measure the policies also with budgets split over the layers: falling, or as "
        "`h2o-gguf calibrate` wrote to FILE; may be given again.",
    ),
]
Attic = Annotated[
    bool,
    typer.Option(
        "--attic",
        help="Measure all that evicts also with an attic, from which what is read recalls what was evicted.",
    ),
]
RecallEvery = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--recall-every",
        metavar="N",
        min=0,
        show_default="as often as costs little, and not in a text that is scored",
        help="With --attic: recall also every N tokens of an answer and of a text that is scored; 0: never.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", "-s", metavar="N", min=0, help="Seed of the samples.")]
Text = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--text",
        metavar="FILE",
        show_default="English that every Python has",
        help="Your own text, to hide needles in and to read.",
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size",
        "-b",
        envvar="LLAMA_ARG_BATCH",
        metavar="N",
        min=1,
        help="Tokens read between two evictions.",
    ),
]
Threads = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--threads",
        "-t",
        envvar="LLAMA_ARG_THREADS",
        metavar="N",
        min=0,
        show_default="physical cores",
        help="Threads to compute with.",
    ),
]
GpuLayers = Annotated[
    int,
    typer.Option(
        "--gpu-layers",
        "-ngl",
        envvar="LLAMA_ARG_N_GPU_LAYERS",
        metavar="N",
        min=-1,
        help="Layers to put on the GPU; -1: all.",
    ),
]
Tolerance = Annotated[
    float,
    typer.Option(
        "--tolerance",
        metavar="PERCENT",
        help="Loss that is accepted: of the score, in points, and in perplexity.",
    ),
]
Folder = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        "--cache",
        metavar="DIR|off",
        show_default="the user's cache folder",
        help="Where results are kept, so that nothing is measured twice.",
    ),
]
Out = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(
        "--out", metavar="PREFIX", show_default=False, help="Also write PREFIX.html, .json and .md."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write JSON instead of a table.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks of errors.")]
