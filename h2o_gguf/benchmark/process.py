"""The parent's side of a worker."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from h2o_gguf.errors import NativeError

__all__ = ["Worker", "WorkerProcess"]

SCRIPT = Path(__file__).with_name("worker.py")
PATIENCE_S = 10.0
SEARCHED = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"


class Worker(Protocol):
    """What the comparison needs of one: benchmark/worker.py has the verbs."""

    facts: dict[str, Any]

    def ask(self, verb: str, *arguments: int) -> dict[str, Any]: ...


class WorkerProcess:
    """A running worker.

    label : what errors call it. job : see benchmark/worker.py; another build's library finds those it needs
    beside it, wherever it was built. facts : what it said about itself.

    Raises: NativeError, with the reason, here and from `ask`.
    """

    def __init__(self, label: str, job: dict[str, Any], command: tuple[str, ...] = ()) -> None:
        self.label = label
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            command or (sys.executable, str(SCRIPT)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            encoding="utf-8",
            env=_environment(job.get("library")),
        )
        try:
            self.facts = self._exchange(job)
        except BaseException:
            self.close()
            raise

    def ask(self, verb: str, *arguments: int) -> dict[str, Any]:
        """Have a command done; return the answer."""
        return self._exchange([verb, *arguments])

    def _exchange(self, message: object) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        if not line:
            raise self._death()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NativeError(f"benchmark of {self.label!r}: {answer['error']}")
        return answer

    def _death(self) -> NativeError:
        try:
            code = self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
            if -code == signal.SIGKILL:
                how += " (is there memory enough?)"
        self._stderr.seek(0)
        said = self._stderr.read().decode("utf-8", "replace").strip().splitlines()
        return NativeError(
            f"benchmark of {self.label!r}: its process {how}: {said[-1] if said else 'it said nothing'}", code
        )

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._process.terminate()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _environment(library: str | None) -> dict[str, str] | None:
    if library is None:
        return None
    found = os.environ.get(SEARCHED)
    return {**os.environ, SEARCHED: library + (os.pathsep + found if found else "")}
