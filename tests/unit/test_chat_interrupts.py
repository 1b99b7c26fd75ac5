"""Ctrl-C before any line of a chat: what the model has seen is what the conversation says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_fakes import FakeLlama
from interrupting import interrupted

from h2o_gguf.chat import ChatSession

FILES = ["chat.py", "reply.py", "stops.py", "text.py"]
TOLD = ["user", "assistant"]


@pytest.fixture(autouse=True)
def no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("h2o_gguf.chat.ChainSampler", lambda *_: contextlib.nullcontext())


def opened(folder: Path) -> tuple[FakeLlama, ChatSession]:
    """After a turn, with a document that waits for the next."""
    llm = FakeLlama("one", "two", "three")
    session = ChatSession(llm, system="Be kind.")
    "".join(session.ask("first?"))
    (folder / "notes.txt").write_text("notes")
    session.read_file(folder / "notes.txt")
    return llm, session


def ask(session: ChatSession) -> None:
    "".join(session.ask("second?"))


def regenerate(session: ChatSession) -> None:
    "".join(session.regenerate())


def change_system(session: ChatSession) -> None:
    session.set_system("Be brief.")


@pytest.mark.parametrize("act", [ask, regenerate, change_system], ids=lambda act: act.__name__)
def test_after_ctrl_c_anywhere_the_conversation_is_whole(
    act: Callable[[ChatSession], None], tmp_path: Path
) -> None:
    n = 0
    while True:
        n += 1
        llm, session = opened(tmp_path)
        if not interrupted(n, lambda session=session: act(session), FILES):  # type: ignore[misc]
            break
        roles = [message["role"] for message in session.messages]
        is_answered = act is ask and len(roles) > 3
        assert roles == ["system", *TOLD * (1 + is_answered)], n
        assert session.attachments or is_answered, f"line {n}: what waited is sent or waits"
        session.drop_attachments()
        reply = "".join(session.ask("third?"))
        seen = session.template.render(session.messages[:-1], opens_reply=True)
        assert llm.says == seen + reply, n
    assert n > 3


def test_what_was_attached_meanwhile_waits_for_the_next_message(tmp_path: Path) -> None:
    _, session = opened(tmp_path)
    reply: Any = session.ask("second?")
    next(reply)
    session.read_file(tmp_path / "notes.txt")
    "".join(reply)
    assert len(session.attachments) == 1 and session.messages[3]["content"].count("notes.txt") == 1
