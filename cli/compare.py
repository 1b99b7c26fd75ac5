"""`h2o-gguf compare`: ways to save memory, side by side, before one is adopted."""

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

__all__ = ["compare"]


@guarded
def compare(
    model: Model = None,
    policy: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--policy", metavar="NAME", show_default="h2o and h2o+", help="A policy; may be given again."
        ),
    ] = None,
    kept: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--kept",
            metavar="X,...",
            show_default="0.25",
            help="Budgets: shares of the length that are kept, or entries per KV head.",
        ),
    ] = None,
    cache_type: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--cache-type",
            metavar="TYPE",
            show_default="q8_0 and q4_0",
            help="A type of keys and values, alone and with each policy; may be given again.",
        ),
    ] = None,
    task: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--task",
            metavar="NAME",
            show_default="single-noise, single-prose, multiquery",
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
        typer.Option("--samples", "-n", metavar="N", min=1, show_default="2", help="Samples of a task."),
    ] = None,
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
    """Compare ways to save memory on your own model: a sliding window, small cache types, eviction, and both.

    Quality is that of the answers and of a text read beside the full cache. All caches take turns at the
    text, so that a busy machine slows all of them alike.
    """
    path = model_path(model)
    if out is not None:
        require_out(out)
    from h2o_gguf.cli.compare_table import show, write_files
    from h2o_gguf.evaluation.evaluation import compare_caches
    from h2o_gguf.evaluation.settings import COMPARISON, Settings
    from h2o_gguf.evaluation.tasks import FIDELITY

    settings = Settings.of(
        COMPARISON, policies=policy, kept=kept, tasks=[FIDELITY, *task] if task else None, lengths=length,
        n_samples=n_samples, seed=seed, text=text, n_batch=batch_size, n_threads=threads or 0,
        n_gpu_layers=gpu_layers, cache=cache, tolerance=tolerance,
        layer_budgets=layer_budgets, attic=attic, recall_every=recall_every,
    )  # fmt: skip
    with LateBar("measuring") as bar:
        report = compare_caches(str(path), settings, cache_type or ["q8_0", "q4_0"], progress=bar.update)
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=1, ensure_ascii=False) + "\n")
    else:
        show(report)
    if out is not None:
        for file in write_files(report, out):
            notice(f"wrote {file}")
