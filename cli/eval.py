"""`h2o-gguf eval`: which policy at which budget to trust."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from h2o_gguf.cli.bench_files import require_plots
from h2o_gguf.cli.guard import guarded
from h2o_gguf.cli.opening import model_path
from h2o_gguf.cli.progress import LateBar
from h2o_gguf.cli.render import notice

__all__ = ["evaluate"]


@guarded
def evaluate(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            envvar="LLAMA_ARG_MODEL",
            metavar="[MODEL]",
            show_default="the default model",
            help="GGUF file or catalog name.",
        ),
    ] = None,
    policy: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--policy",
            metavar="NAME",
            show_default="h2o+",
            help="A policy; may be given again. streaming and random always come along.",
        ),
    ] = None,
    kept: Annotated[
        str,
        typer.Option(
            "--kept",
            metavar="X,...",
            help="Budgets: shares of the length that are kept, or entries per KV head.",
        ),
    ] = "0.5,0.25",
    task: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--task",
            metavar="NAME",
            show_default="fidelity, single-prose, multikey, multiquery",
            help="A task, or ruler, grid, or all; may be given again.",
        ),
    ] = None,
    length: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(
            "--length",
            metavar="N",
            min=64,
            show_default="1024",
            help="Tokens of context, question and answer; may be given again.",
        ),
    ] = None,
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            metavar="bounded|one-shot",
            help="Whether the budget is kept while reading, or all is read and evicted once.",
        ),
    ] = "bounded",
    question: Annotated[
        str,
        typer.Option(
            "--question",
            metavar="hidden|seen",
            help="Whether the question comes after the eviction or before.",
        ),
    ] = "hidden",
    n_samples: Annotated[
        int, typer.Option("--samples", "-n", metavar="N", min=1, help="Samples of a task.")
    ] = 4,
    seed: Annotated[
        int,
        typer.Option(
            "--seed", "-s", envvar="LLAMA_ARG_SEED", metavar="N", min=0, help="Seed of the samples."
        ),
    ] = 0,
    text: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--text",
            metavar="FILE",
            show_default="English that every Python has",
            help="Your own text, to hide needles in and to read.",
        ),
    ] = None,
    batch_size: Annotated[
        int,
        typer.Option(
            "--batch-size",
            "-b",
            envvar="LLAMA_ARG_BATCH",
            metavar="N",
            min=1,
            help="Tokens read between two evictions.",
        ),
    ] = 128,
    threads: Annotated[
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
    ] = None,
    gpu_layers: Annotated[
        int,
        typer.Option(
            "--gpu-layers",
            "-ngl",
            envvar="LLAMA_ARG_N_GPU_LAYERS",
            metavar="N",
            min=-1,
            help="Layers to put on the GPU; -1: all.",
        ),
    ] = 0,
    tolerance: Annotated[
        float,
        typer.Option(
            "--tolerance",
            metavar="PERCENT",
            help="Loss that is accepted: of the score, in points, and in perplexity.",
        ),
    ] = 1.0,
    cache: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--cache",
            metavar="DIR|off",
            show_default="the user's cache folder",
            help="Where results are kept, so that nothing is measured twice.",
        ),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--out", metavar="PREFIX", show_default=False, help="Also write PREFIX.html, .json and .md."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of a table.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks of errors.")] = False,
) -> None:
    """Measure on your own model which policy at which budget answers as the full cache does.

    Texts are made in which something must be found, followed or counted, and are read with the full cache and
    with each policy at each budget. What was measured is kept: a run that was interrupted goes on, and a
    larger one measures only what is new.
    """
    path = model_path(model)
    if out is not None:
        require_plots()
    from h2o_gguf.cli.eval_files import write_files
    from h2o_gguf.cli.eval_table import show
    from h2o_gguf.evaluation.evaluation import Settings, evaluate

    settings = Settings.of(
        policies=policy,
        kept=kept,
        tasks=task,
        lengths=length,
        mode=mode,
        question=question,
        n_samples=n_samples,
        seed=seed,
        text=text,
        n_batch=batch_size,
        n_threads=threads or 0,
        n_gpu_layers=gpu_layers,
        cache=cache,
        tolerance=tolerance,
    )
    with LateBar("measuring") as bar:
        report = evaluate(str(path), settings, progress=bar.update)
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n")
    else:
        show(report)
    if out is not None:
        for file in write_files(report, out):
            notice(f"wrote {file}")
