"""Errors become one line on stderr and an exit code."""

from __future__ import annotations

import errno
import functools
import sys
from collections.abc import Callable
from typing import Any

import typer

from h2o_gguf.cli.leaving import leave, raising_at_interrupt
from h2o_gguf.cli.render import complain, notice
from h2o_gguf.errors import BUG, INTERRUPTED, NO_FIT, USAGE, Cancelled, H2OError, in_short

__all__ = ["guarded"]


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with its errors rendered; tracebacks only with --verbose."""

    @functools.wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            with raising_at_interrupt():
                command(*args, **kwargs)
                sys.stdout.flush()
        except KeyboardInterrupt:
            leave()
        except Cancelled as error:
            notice(str(error))
            raise typer.Exit(INTERRUPTED) from None
        except H2OError as error:
            if _is_verbose(kwargs):
                _show_traceback()
            complain(str(error))
            raise typer.Exit(error.exit_code) from None
        except MemoryError:
            if _is_verbose(kwargs):
                _show_traceback()
            complain("there is not enough memory: lower n_ctx, kv_budget or n_batch")
            raise typer.Exit(NO_FIT) from None
        except OSError as error:  # a disk that is full, a file that cannot be read: the system's word on it
            if _is_verbose(kwargs):
                _show_traceback()
            complain(f"the system refused: {error.strerror or error}")
            raise typer.Exit(NO_FIT if error.errno == errno.ENOSPC else USAGE) from None
        except Exception as error:
            if _is_ours(error):
                raise
            if _is_verbose(kwargs):
                _show_traceback()
            complain(in_short(error))
            complain("this is a bug in h2o-gguf; --verbose shows where")
            raise typer.Exit(BUG) from None

    return wrapper


def _is_ours(error: Exception) -> bool:
    """Whether typer raised it to leave or to explain the usage."""
    return type(error).__module__.split(".")[0] in ("typer", "click")


def _is_verbose(kwargs: dict[str, Any]) -> bool:
    return any(
        bool(value) if name == "verbose" else getattr(value, "verbose", False)
        for name, value in kwargs.items()
    )


def _show_traceback() -> None:
    import traceback

    traceback.print_exc()
