"""What the lines that begin with a slash do, without a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from chat_fakes import FakeLlama

from h2o_gguf.chat import ChatSession
from h2o_gguf.cli.chat_commands import LEAVE, handle
from h2o_gguf.cli.conversation import Conversation


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(ChatSession(FakeLlama("one", "two")), sets_off=False)


def said(conversation: Conversation, line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert handle(conversation, line) is None
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["/exit", "/regen", "/clear", "/kv", "/help"])
def test_an_argument_that_nobody_reads_is_answered(
    conversation: Conversation, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{name} takes no argument, 'now' is unknown" in said(conversation, f"{name} now", capsys)


def test_exit_leaves(conversation: Conversation) -> None:
    assert handle(conversation, "/exit") == LEAVE


def test_set_with_a_name_alone_shows_that_setting(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(conversation, "/set seed", capsys).split() == ["seed", "random"]
    assert "there is no setting 'sead'" in said(conversation, "/set sead", capsys)


def test_a_limit_of_no_tokens_is_refused(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "at least -1, not 0" in said(conversation, "/set predict 0", capsys)
    assert "predict is 1" in said(conversation, "/set predict 1", capsys)


def test_one_message_is_counted_as_one(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    said(conversation, "/system Be brief.", capsys)
    assert "this conversation: 1 message," in said(conversation, "/kv", capsys)


def test_help_names_the_keys(conversation: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(conversation, "/help", capsys)
    assert all(key in text for key in ("Alt-Enter", "Ctrl-J", "Tab", "Up", "Ctrl-C", "Ctrl-D"))


def test_why_without_a_record_says_what_is_missing(
    conversation: Conversation, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "nothing is ever evicted" in said(conversation, "/why", capsys)
    conversation.session._engine.policy = SimpleNamespace(budget=64)
    assert "this chat does not note what leaves" in said(conversation, "/why page.html", capsys)


@pytest.mark.parametrize("name", ["/save", "/load"])
def test_what_is_missing_is_said_plainly(
    conversation: Conversation, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(conversation, f"{name} x", capsys)
    assert f"there is no {name}" in text and "later" not in text and "this version" not in text
    assert f"{name[1:]}_state() in Python" in text, "and what does it"
