"""What llama.cpp takes for impossible ends the process: here with a line on stderr and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from h2o_gguf.cli.render import complain
from h2o_gguf.errors import MODEL_FILE, NATIVE

__all__ = ["explained_aborts"]


@contextmanager
def explained_aborts(model: Path) -> Iterator[None]:
    """In the with-block, which loads the model, an abort is its file's fault; after it a native failure."""
    from h2o_gguf.native import on_abort

    code, text = (
        MODEL_FILE,
        f"cannot load the model {str(model)!r}: llama.cpp gave up ({{}}); it may be damaged",
    )

    def leave(reason: str) -> None:
        place, colon, condition = reason.partition(": ")
        complain(text.format(f"{Path(place).name}{colon}{condition}"))
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)

    on_abort(leave)
    yield
    code, text = NATIVE, "llama.cpp gave up ({}): this is a bug in h2o-gguf or llama.cpp"
