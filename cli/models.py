"""`h2o-gguf models`: models that can be fetched by name."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from h2o_gguf import models as catalog
from h2o_gguf.cli.fetching import fetch_with_bar
from h2o_gguf.cli.guard import guarded
from h2o_gguf.cli.render import notice, show_bytes
from h2o_gguf.models.catalog import DEFAULT_MODEL, models_dir

__all__ = ["app"]

app = typer.Typer(
    help="List, fetch and remove models.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)

Name = Annotated[str, typer.Argument(metavar="[NAME]", help="A name from `h2o-gguf models list`.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks of errors.")]


@app.command("list")
@guarded
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON.")] = False, verbose: Verbose = False
) -> None:
    """List the models that can be fetched by name, and which are here."""
    found = catalog.list_models()
    if as_json:
        rows = [
            {
                "name": status.model.name,
                "title": status.model.title,
                "licence": status.model.licence,
                "bytes": status.model.n_bytes,
                "sha256": status.model.sha256,
                "is_default": status.model.name == DEFAULT_MODEL,
                "is_installed": status.is_installed,
                "is_damaged": status.is_damaged,
                "path": str(status.path),
                "disk_bytes": status.n_disk_bytes,
            }
            for status in found
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(len(status.model.name) for status in found)
    for status in found:
        state = "here" if status.is_installed else "started" if status.n_disk_bytes else "-"
        size = show_bytes(status.model.n_bytes)
        note = ""
        if status.is_damaged and status.n_file_bytes is not None:
            state, size = "damaged", show_bytes(status.n_file_bytes)
            note = f", not {show_bytes(status.model.n_bytes)}: h2o-gguf models fetch {status.model.name}"
        default = " (default)" if status.model.name == DEFAULT_MODEL else ""
        typer.echo(
            f"{status.model.name:<{width}}  {state:<7}  {size:>9}  {status.model.title}{default}{note}"
        )
    notice(f"Models lie in {models_dir()}; $H2O_GGUF_MODELS names another folder.")


@app.command()
@guarded
def fetch(name: Name = DEFAULT_MODEL, verbose: Verbose = False) -> None:
    """Fetch a model and check its sha256; the path goes to stdout."""
    typer.echo(str(fetch_with_bar(name)))


@app.command()
@guarded
def remove(
    name: Annotated[str, typer.Argument(help="A name from `models list`.")], verbose: Verbose = False
) -> None:
    """Delete a fetched model, and what is left of an unfinished fetch."""
    freed = catalog.remove(name)
    notice(f"{name} removed: {show_bytes(freed)} are free again." if freed else f"{name} was not here.")


@app.command()
@guarded
def path(name: Name = DEFAULT_MODEL, verbose: Verbose = False) -> None:
    """Print the path of a fetched model."""
    typer.echo(str(catalog.resolve(name)))
