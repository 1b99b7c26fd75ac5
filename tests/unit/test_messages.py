"""Messages reach a template in the shape it reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from harness import require_runtime

from h2o_gguf.chat_template import ChatTemplateError
from h2o_gguf.errors import OptionError
from h2o_gguf.messages import FittingFormatter, as_texts

JOINS = "{% for m in messages %}[{{ m['role'] + ':' + m['content'] }}]{% endfor %}"
PRINTS = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
READS_PARTS = (
    "{% for m in messages %}[{{ m.role }}:{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}]{% endfor %}"
)
MINDS_NONE = (
    "{% for m in messages %}[{{ m.role }}:{% if m.content is none %}calls {{ m.tool_calls | length }}"
    "{% else %}{{ m.content }}{% endif %}]{% endfor %}"
)
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
SILENT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [1]}]


def formatter(template: str) -> FittingFormatter:
    require_runtime()
    from h2o_gguf.native import high

    return FittingFormatter(
        high.llama_chat_format.Jinja2ChatFormatter(template=template, eos_token="", bos_token="")
    )


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (JOINS, PARTS, "[user:a\nb]"),
        (PRINTS, PARTS, "[user:a\nb]"),
        (MINDS_NONE, PARTS, "[user:a\nb]"),
        (READS_PARTS, PARTS, "[user:<a><b>]"),
        (JOINS, SILENT, "[user:a][assistant:]"),
        (PRINTS, SILENT, "[user:a][assistant:]"),
        (MINDS_NONE, SILENT, "[user:a][assistant:calls 1]"),
        (JOINS, [{"role": "user"}, {"role": "wizard", "content": "x"}], "[user:][wizard:x]"),
        (JOINS, [{"role": "user", "content": []}], "[user:]"),
        (READS_PARTS, [{"role": "user", "content": "a"}], "[user:a]"),
    ],
)
def test_contents_arrive_as_the_template_reads_them(template: str, messages: Any, text: str) -> None:
    assert formatter(template)(messages=messages).prompt == text


@pytest.mark.parametrize("template", [JOINS, READS_PARTS])
def test_a_part_that_is_no_text_is_refused_whatever_the_template_reads(template: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(OptionError, match=r"messages\[1\]\['content'\]\[1\] is of type 'image_url'.*handler"):
        formatter(template)(messages=[{"role": "user", "content": "a"}, {"role": "user", "content": parts}])


def test_what_a_template_raises_is_said_in_its_words() -> None:
    template = "{% if messages | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}" + JOINS
    with pytest.raises(ChatTemplateError, match="one at a time"):
        formatter(template)(messages=PARTS + PARTS)
    with pytest.raises(ChatTemplateError, match="'dict object' has no attribute 'nothing'"):
        formatter("{{ messages[0].nothing.more }}")(messages=PARTS)


def test_texts_and_none_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "name": "b"}]
    assert as_texts(messages) == [messages[0], {**messages[1], "content": None}]


@pytest.mark.parametrize("name", ["chatml", "llama-3", "mistral-instruct"])
def test_formats_of_llama_cpp_get_texts_and_refuse_roles_they_would_leave_out(name: str) -> None:
    require_runtime()
    from h2o_gguf.templates import chat_handlers

    handler = chat_handlers({}, "", "", 2)[name]
    prompts: list[str] = []

    def complete(**options: Any) -> Any:
        prompts.append(options["prompt"].decode())
        return {"id": "", "created": 0, "model": "", "usage": {}, "choices": [{"text": ""} | CHOICE]}

    model = SimpleNamespace(tokenize=lambda text, **_: text, create_completion=complete, verbose=False)
    handler(llama=model, messages=PARTS)
    assert "a\nb" in prompts[0]
    with pytest.raises(OptionError, match=r"messages\[0\]\['role'\] is 'wizard'"):
        handler(llama=model, messages=[{"role": "wizard", "content": "a"}])


CHOICE: dict[str, Any] = {"logprobs": None, "finish_reason": "stop"}
