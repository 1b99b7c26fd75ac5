"""What a chat makes of what was typed, and where it is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_gguf.cli.chat_input import Message, parse
from h2o_gguf.cli.history import VARIABLE, history_file, open_history


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


@pytest.mark.parametrize(
    ("name", "words"), [("/dev/null", ""), ("/dev/zero", "is no file"), (".", "is no file")]
)
def test_only_a_file_keeps_a_history(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, name)
    assert history_file(True) is None
    said = capsys.readouterr().err
    assert words in said and bool(said) == bool(words)


def test_a_history_that_fails_is_said_once_and_kept_in_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = open_history(tmp_path)  # a folder can be neither read nor written as a file
    assert list(history.load_history_strings()) == []
    history.append_string("one")
    history.append_string("two")
    assert history.get_strings() == ["one", "two"]
    assert capsys.readouterr().err.count("no history") == 1


def test_a_history_is_read_back(tmp_path: Path) -> None:
    open_history(tmp_path / "history").append_string("one\nline")
    assert list(open_history(tmp_path / "history").load_history_strings()) == ["one\nline"]
