"""`h2o-gguf explain`: what was forgotten, and why."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from h2o_gguf.cli.flags import expand_flags
from h2o_gguf.cli.guard import guarded
from h2o_gguf.cli.interrupt import cancel_on_interrupt
from h2o_gguf.cli.opening import open_model, pinned_spans
from h2o_gguf.cli.options import CacheFlags, ModelFlags, SamplingFlags
from h2o_gguf.cli.progress import LateBar
from h2o_gguf.cli.prompts import open_document, warn_replaced
from h2o_gguf.cli.render import notice
from h2o_gguf.cli.sampling import max_tokens, sampling_options, seed_of
from h2o_gguf.cli.streaming import Printer
from h2o_gguf.cli.streams import well_formed_option
from h2o_gguf.cli.why import check_page, show, write_page
from h2o_gguf.errors import OptionError

__all__ = ["explain"]

BUDGET = 512


@expand_flags(temp=0.0, repeat_penalty=1.1, predict=128)
@guarded
def explain(
    context: typer.Context,
    gguf: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            metavar="[MODEL]",
            show_default="the default model",
            help="GGUF file or catalog name, the same as -m.",
        ),
    ] = None,
    *,
    file: Annotated[
        str,
        typer.Option("--file", "-f", metavar="FILE", show_default=False, help="The text; - is stdin."),
    ],
    question: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            callback=well_formed_option,
            show_default="a summary",
            help="What to answer at the end of the text.",
        ),
    ] = None,
    system: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--system-prompt",
            "-sys",
            metavar="TEXT",
            callback=well_formed_option,
            show_default=False,
            help="System message; never evicted.",
        ),
    ] = None,
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--out",
            "-o",
            metavar="FILE.html",
            show_default=False,
            help="Write a page for a browser, and only the answer on stdout.",
        ),
    ] = None,
    model: ModelFlags,
    cache: CacheFlags,
    sampling: SamplingFlags,
) -> None:
    """Read a text, answer about it, and show what was forgotten and what the answer looked at.

    The text is read three times: to answer, to see where the answer looked, and with a full cache, to see
    what it would have used. Without --kv-budget 512 entries per KV head are kept, or what the model allows.
    """
    model = _with(model, gguf, context)
    if out is not None:
        check_page(out)
    with open_document(file) as document, open_model(model, cache, BUDGET) as llm:
        from h2o_gguf import explain as library

        printer = Printer(silent=out is None)
        with cancel_on_interrupt() as cancel, LateBar("reading") as bar:

            def write(piece: str) -> None:
                bar.close()
                printer.write(piece)

            explanation = library.explain(
                llm,
                document,
                question=library.QUESTION if question is None else question,
                system=system,
                sampling=sampling_options(sampling),
                seed=seed_of(sampling),
                max_tokens=max_tokens(sampling),
                pin=pinned_spans(cache),
                progress=lambda p: bar.update(p.n_read, p.n_total),
                on_text=write,
                on_replay=lambda n, n_total: bar.update(n, n_total, title="reading it again"),
                cancel=cancel,
            )
        printer.end()
        warn_replaced(document)
        if out is None:
            show(explanation, Console(file=sys.stdout, highlight=False, soft_wrap=not sys.stdout.isatty()))
            notice("--out FILE.html writes all of it as a page, over time, by layer and head")
        else:
            write_page(explanation, out)


def _with(model: ModelFlags, gguf: str | None, context: typer.Context) -> ModelFlags:
    """The flags with the model that was given as an argument."""
    if gguf is None:
        return model
    source = context.get_parameter_source("model")
    if source is not None and source.name == "COMMANDLINE":
        raise OptionError("the model is given twice, as an argument and with -m: give one", "model")
    return replace(model, model=gguf)
