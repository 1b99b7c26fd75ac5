"""Progress bars: late, once, and gone when they end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from io import StringIO

import pytest
from rich.console import Console

from h2o_gguf.cli import progress
from h2o_gguf.cli.progress import LateBar

PATIENCE_S = 0.1


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[StringIO]:
    """What a terminal is sent."""
    file = StringIO()
    monkeypatch.setattr(progress, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(progress, "is_terminal", lambda: True)
    monkeypatch.setattr(progress, "stderr", lambda: Console(file=file, force_terminal=True, width=120))
    yield file


def test_what_takes_long_to_begin_has_a_bar_too(shown: StringIO) -> None:
    with LateBar("measuring") as bar:
        bar.update(0, 1000)
        assert shown.getvalue() == ""
        end = time.monotonic() + 30
        while "measuring" not in shown.getvalue() and time.monotonic() < end:
            time.sleep(0.01)
        assert "0/1000" in shown.getvalue()


def test_what_ends_soon_has_no_bar(shown: StringIO) -> None:
    with LateBar("measuring") as bar:
        bar.update(0, 1000)
        bar.update(1000, 1000)
    time.sleep(2 * PATIENCE_S)
    assert shown.getvalue() == ""
