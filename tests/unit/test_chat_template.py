"""Rendering of messages."""

from __future__ import annotations

import pytest
from chat_fakes import TEMPLATE, FakeLlama, use_fake_sampler

from h2o_gguf.chat import ChatSession
from h2o_gguf.chat_template import ChatTemplate, ChatTemplateError

USER = {"role": "user", "content": "Hi"}


def test_a_template_that_cannot_be_read_fails_when_it_is_used_not_when_the_model_loads() -> None:
    session = ChatSession(FakeLlama(template="{% unknown %}"))
    with pytest.raises(ChatTemplateError, match="unknown") as caught:
        next(session.ask("Hi"))
    assert caught.value.exit_code == 3
    assert isinstance(caught.value, ValueError)
    assert session.messages == []


def test_a_template_that_raises_gives_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('only dogs may talk') }}")
    with pytest.raises(ChatTemplateError, match="only dogs may talk"):
        template.render([USER], opens_reply=True)


def test_the_reply_is_opened_only_when_asked() -> None:
    template = ChatTemplate(TEMPLATE, bos="<s>")
    assert template.render([USER], opens_reply=True) == "<s><|user|>Hi<|end|><|assistant|>"
    assert template.render([USER], opens_reply=False) == "<s><|user|>Hi<|end|>"


def test_a_default_system_message_of_the_template_belongs_to_the_opening() -> None:
    source = "{% if messages[0].role != 'system' %}<|system|>Be kind.<|end|>{% endif %}" + TEMPLATE
    assert ChatTemplate(source, bos="").opening(None) == "<|system|>Be kind.<|end|><|user|>"
    assert ChatTemplate(source, bos="").opening("Be rude.") == "<|system|>Be rude.<|end|><|user|>"


def test_without_a_template_a_plain_layout_ends_where_the_user_speaks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_fake_sampler(monkeypatch.setattr, "h2o_gguf.chat")
    llm = FakeLlama(" Hello.\nUser: and I made this up", " Bye.", template="", ends=False)
    session = ChatSession(llm, system="Two friends talk.")
    assert "".join(session.ask("Hi")) == " Hello."
    assert "".join(session.ask("Ho")) == " Bye."
    assert llm.says == "<s>Two friends talk.\nUser: Hi\nAssistant: Hello.\nUser: Ho\nAssistant: Bye."


def test_raw_text_is_continued_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_sampler(monkeypatch.setattr, "h2o_gguf.chat")
    llm = FakeLlama(" more")
    session = ChatSession(llm, template=ChatTemplate.raw())
    assert "".join(session.ask("<|user|>text")) == " more"
    assert llm.says == "<s><|user|>text more"
    assert llm.engine.pins == []
