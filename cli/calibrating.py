"""`h2o-gguf calibrate`: which layers need the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from h2o_gguf.cli.eval_options import GpuLayers, Model, Threads, Verbose
from h2o_gguf.cli.guard import guarded
from h2o_gguf.cli.opening import model_path
from h2o_gguf.cli.progress import LateBar
from h2o_gguf.cli.render import layer_classes, notice
from h2o_gguf.documents import Document

__all__ = ["calibrate"]


@guarded
def calibrate(
    model: Model = None,
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE", show_default=False, help="Where to write it, for --layer-budgets."
        ),
    ],
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            show_default="English that every Python has",
            help="Text of the kind that will be read.",
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="By whom entries will be evicted.")
    ] = "h2o+",
    length: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--length",
            metavar="N",
            min=1,
            show_default="2048, or what the model can hold",
            help="Tokens of the text to read; budgets up to nearly as many entries can then be split.",
        ),
    ] = None,
    kv_budget: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--kv-budget",
            metavar="N",
            min=1,
            show_default=False,
            help="Also show how this budget will be split.",
        ),
    ] = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    verbose: Verbose = False,
) -> None:
    """Measure what each layer loses at each budget, so that --layer-budgets gives entries where they count.

    The beginning of a text is read once with the full cache. What layers would lose is the change of their
    output for the last tokens, had the policy evicted before them.
    """
    path = str(model_path(model))
    from h2o_gguf import calibration
    from h2o_gguf.evaluation.texts import prose

    if file is None:
        text = prose()
    else:
        with Document.open(file) as document:
            text = document.text()
    with LateBar("calibrating") as bar:
        found = calibration.calibrate(
            path, text, policy, n_tokens=length, n_threads=threads or 0, n_gpu_layers=gpu_layers,
            progress=bar.update,
        )  # fmt: skip
    budgets = found.split(kv_budget).over(found.layers, 0) if kv_budget is not None else ()
    found.save(out)
    if budgets:
        typer.echo(layer_classes(budgets))
    notice(f"wrote {out}; use it with --layer-budgets {out} --kv-budget N, up to {found.budgets[-1]:,}")
