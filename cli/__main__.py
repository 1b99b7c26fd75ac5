"""`h2o-gguf`, which is `python -m h2o_gguf.cli` as well."""

from __future__ import annotations

from h2o_gguf.cli.leaving import leave_at_interrupt

__all__ = ["main"]


def main() -> None:
    """Run the command line and leave with its exit code."""
    leave_at_interrupt()
    from h2o_gguf.cli.app import run_app  # half a second of imports

    run_app()


if __name__ == "__main__":
    main()
