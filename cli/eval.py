"""`h2o-gguf eval`: which policy at which budget to trust."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Optional

import typer

from h2o_gguf.cli.bench_files import require_out
from h2o_gguf.cli.eval_options import (
    Attic,
    BatchSize,
    Folder,
    GpuLayers,
    Json,
    LayerBudgets,
    Model,
    Out,
    RecallEvery,
    Seed,
    Text,
    Threads,
    Tolerance,
    Verbose,
)
from h2o_gguf.cli.guard import guarded
from h2o_gguf.cli.opening import model_path
from h2o_gguf.cli.progress import LateBar
from h2o_gguf.cli.render import notice

__all__ = ["evaluate"]


@guarded
def evaluate(
    model: Model = None,
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
        Optional[str],  # noqa: UP045
        typer.Option(
            "--kept",
            metavar="X,...",
            show_default="0.5,0.25",
            help="Budgets: shares of the length that are kept, or entries per KV head.",
        ),
    ] = None,
    task: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--task",
            metavar="NAME",
            show_default="fidelity, single-prose, multikey, multiquery",
            help="A task, or ruler, grid, rivals, rivals-noise, or all; may be given again.",
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
    n_samples: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--samples", "-n", metavar="N", min=1, show_default="3", help="Samples of a task."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="What is not named otherwise: all tasks, lengths of 1024, 2048 and 4096, budgets of 0.5, "
            "0.25 and 0.1, 20 samples. Hours on a CPU.",
        ),
    ] = False,
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
    layer_budgets: LayerBudgets = None,
    attic: Attic = False,
    recall_every: RecallEvery = None,
    seed: Seed = 0,
    text: Text = None,
    batch_size: BatchSize = 128,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    tolerance: Tolerance = 1.0,
    cache: Folder = None,
    out: Out = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure on your own model which policy at which budget answers as the full cache does.

    Texts are made in which something must be found, followed or counted, and are read with the full cache and
    with each policy at each budget. What was measured is kept: a run that was interrupted goes on, and a
    larger one measures only what is new.
    """
    path = model_path(model)
    if out is not None:
        require_out(out)
    from h2o_gguf.cli.eval_files import write_files
    from h2o_gguf.cli.eval_table import show
    from h2o_gguf.evaluation.evaluation import evaluate
    from h2o_gguf.evaluation.settings import FULL_RUN, QUICK_RUN, Settings

    settings = Settings.of(
        FULL_RUN if full else QUICK_RUN, policies=policy, kept=kept, tasks=task, lengths=length,
        n_samples=n_samples, mode=mode, question=question, seed=seed, text=text, n_batch=batch_size,
        n_threads=threads or 0, n_gpu_layers=gpu_layers, cache=cache, tolerance=tolerance,
        layer_budgets=layer_budgets, attic=attic, recall_every=recall_every,
    )  # fmt: skip
    with LateBar("measuring") as bar:
        report = evaluate(str(path), settings, progress=bar.update)
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n")
    else:
        show(report)
    if out is not None:
        for file in write_files(report, out):
            notice(f"wrote {file}")
