"""Bars on stderr, for what takes more than a second and when a person is there to see it."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Literal

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from h2o_gguf.cli.render import is_terminal, stderr

__all__ = ["LateBar"]

PATIENCE_S = 1.0


class LateBar:
    """A progress bar that appears once the work has taken a second, and leaves no trace."""

    def __init__(self, title: str, unit: Literal["tokens", "bytes"] = "tokens") -> None:
        self._title = title
        self._unit = unit
        self._start_s = time.monotonic()
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._lock = threading.Lock()
        self._late: threading.Timer | None = None  # shows what was said too early, if nothing more is
        self._said: tuple[int, int | None] = (0, None)

    def update(self, n: int, n_total: int | None = None, *, title: str | None = None) -> None:
        """Show that n of n_total are done; n_total None: nobody knows.  title : from now on."""
        if not is_terminal():
            return
        with self._lock:
            self._title, self._said = title or self._title, (n, n_total)
            early_s = PATIENCE_S - (time.monotonic() - self._start_s)
            if early_s <= 0:
                self._show()
            elif self._late is None:
                self._late = threading.Timer(early_s, self._show_late)
                self._late.daemon = True
                self._late.start()

    def _show_late(self) -> None:
        with self._lock:
            if self._late is not None and self._progress is None:
                self._show()

    def _show(self) -> None:
        n, n_total = self._said
        if self._progress is None:
            self._progress = Progress(*self._columns(), console=stderr(), transient=True)
            self._progress.start()
            self._task = self._progress.add_task(self._title, total=n_total, rate="")
        rate = n / max(time.monotonic() - self._start_s, 1e-9)
        self._progress.update(
            self._task, description=self._title, completed=n, total=n_total, rate=f"{rate:,.0f} tokens/s"
        )

    def close(self) -> None:
        """Take the bar away."""
        with self._lock:
            if self._late is not None:
                self._late.cancel()
                self._late = None
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    def __enter__(self) -> LateBar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _columns(self) -> list[ProgressColumn]:
        columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()]
        if self._unit == "bytes":
            return [*columns, DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
        return [*columns, MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn()]
