"""The `h2o-gguf` command."""

from __future__ import annotations

from typing import Annotated

import typer

from h2o_gguf import __version__
from h2o_gguf.cli import (
    bench,
    calibrating,
    chat,
    compare,
    eval,
    explaining,
    inspecting,
    models,
    run,
    summarize,
)
from h2o_gguf.cli.streams import prepare_streams

__all__ = ["app", "run_app"]

app = typer.Typer(
    name="h2o-gguf",
    help="Chat without end, and read documents of any length, inside a KV cache that never grows.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"h2o-gguf {__version__}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave."),
    ] = False,
) -> None:
    """Chat without end, and read documents of any length, inside a KV cache that never grows."""


app.command("chat")(chat.chat)
app.command("run")(run.run)
app.command("summarize")(summarize.summarize)
app.command("explain")(explaining.explain)
app.command("inspect")(inspecting.inspect)
app.command("bench")(bench.bench)
app.command("eval")(eval.evaluate)
app.command("compare")(compare.compare)
app.command("calibrate")(calibrating.calibrate)
app.add_typer(models.app, name="models")


def run_app() -> None:
    """Run the command line and leave with its exit code."""
    prepare_streams()
    app(prog_name="h2o-gguf")
