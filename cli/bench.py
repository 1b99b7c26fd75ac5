"""`h2o-gguf bench`: speed beside llama.cpp's own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from h2o_gguf.cli.bench_files import require_out, write_files
from h2o_gguf.cli.bench_table import show
from h2o_gguf.cli.guard import guarded
from h2o_gguf.cli.opening import model_path
from h2o_gguf.cli.options import KeyType, ValueType
from h2o_gguf.cli.progress import LateBar
from h2o_gguf.cli.render import notice

__all__ = ["bench"]


@guarded
def bench(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            envvar="LLAMA_ARG_MODEL",
            metavar="[MODEL]",
            show_default="the default model",
            help="GGUF file or catalog name.",
        ),
    ] = None,
    history: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(
            "--history",
            metavar="N",
            show_default="200, 1536, 4096 and 7500, as far as the model's context goes",
            help="Tokens before the ones that are timed; may be given again.",
        ),
    ] = None,
    share: Annotated[
        Optional[list[float]],  # noqa: UP045
        typer.Option(
            "--kv-budget-share",
            metavar="X",
            show_default="0.2 and 0.1",
            help="A budget, as a share of the history; may be given again.",
        ),
    ] = None,
    scores_off: Annotated[
        bool, typer.Option("--scores-off", help="Also measure our attention without scores.")
    ] = False,
    stock: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--stock",
            metavar="DIR",
            show_default="this runtime with its hooks off",
            help="Folder of an unmodified llama.cpp library of the same version, to compare with.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", metavar="N", min=1, help="Repetitions.")] = 9,
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
    ubatch_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--ubatch-size",
            "-ub",
            envvar="LLAMA_ARG_UBATCH",
            metavar="N",
            min=1,
            show_default="512, less beside a small budget",
            help="Tokens computed at once while reading.",
        ),
    ] = None,
    cache_type_k: KeyType = "f16",
    cache_type_v: ValueType = "f16",
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON instead of a table.")] = False,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--out",
            metavar="PREFIX",
            show_default=False,
            help="Also write PREFIX.json, .md, .png and .html.",
        ),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks of errors.")] = False,
) -> None:
    """Measure speed and memory at several lengths of history: llama.cpp's full cache, ours, ours in budgets.

    All of them run side by side and take turns, so that a busy machine slows all alike; what counts is the
    ratios. The scale is an unmodified llama.cpp (--stock), or else this runtime with its hooks off.
    """
    path = model_path(model)
    if out is not None:
        require_out(out)
    from h2o_gguf.benchmark.comparison import compare
    from h2o_gguf.benchmark.variants import Settings

    settings = Settings(
        histories=tuple(sorted(set(history or ()))),
        shares=Settings.shares if share is None else tuple(share),
        repeats=repeats,
        n_threads=threads or 0,
        n_ubatch=ubatch_size,
        type_k=cache_type_k,
        type_v=cache_type_v,
        stock=stock.resolve() if stock is not None else None,
        scores_off=scores_off,
    )
    with LateBar("measuring") as bar:
        report = compare(str(path), settings, progress=bar.update)
    if as_json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2, ensure_ascii=False) + "\n")
    else:
        show(report)
    if out is not None:
        for file in write_files(report, out):
            notice(f"wrote {file}")
