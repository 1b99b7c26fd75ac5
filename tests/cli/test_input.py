"""What a chat makes of what was typed, and where it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_gguf.cli.chat_input import Message, parse
from h2o_gguf.cli.history import VARIABLE, history_file


@pytest.mark.parametrize("typed", ["/help", "/read a file.txt\n", "/unknown"])
def test_one_line_that_begins_with_a_slash_is_a_command(typed: str) -> None:
    assert parse(typed) == Message(typed.strip(), is_command=True)


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ('"""/exit"""', "/exit"),
        ('"""\n/usr/bin\n/etc\n"""', "/usr/bin\n/etc"),
        ("/usr/bin\n/etc", "/usr/bin\n/etc"),
        (" /exit", "/exit"),
        ("hello", "hello"),
    ],
)
def test_quoted_text_many_lines_and_a_slash_after_a_space_are_sent(typed: str, text: str) -> None:
    assert parse(typed) == Message(text)


def test_a_history_others_could_read_becomes_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "history"
    path.write_text("+old\n")
    path.chmod(0o644)
    monkeypatch.setenv(VARIABLE, str(path))
    assert history_file(True) == path
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text() == "+old\n"
