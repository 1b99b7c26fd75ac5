"""OpenAI's messages in the shape a chat template reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from h2o_gguf.chat_template import ChatTemplateError
from h2o_gguf.errors import OptionError

__all__ = ["FittingFormatter", "as_texts", "check_choice"]

PROBE = "h2o-gguf was here"

Message = Mapping[str, Any]


class FittingFormatter:
    """A formatter of llama-cpp-python that gets messages as its template can read them.

    Text in parts goes as parts to a template that reads them, joined by newlines to others; content that is
    None goes as None where the template minds it, else as "". Parts that are no text are refused.

    Raises: OptionError, a part is no text. ChatTemplateError, the template refuses the messages.
    """

    def __init__(self, formatter: Callable[..., Any]) -> None:
        self._formatter = formatter

    def __call__(self, *, messages: Sequence[Message], **options: Any) -> Any:
        pairs = zip(messages, as_texts(messages), strict=True)
        fitting = [self._fit(given, text) for given, text in pairs]
        try:
            return self._formatter(messages=fitting, **options)
        except Exception as error:  # a template is a program of its author's
            raise ChatTemplateError(str(error) or type(error).__name__) from error

    def _fit(self, given: Message, text: Message) -> Message:
        if text["content"] is None:
            return text if self._reads_none else {**text, "content": ""}
        return given if self._reads_parts else text

    @functools.cached_property
    def _reads_parts(self) -> bool:
        text = self._try([{"role": "user", "content": [{"type": "text", "text": PROBE}]}])
        return PROBE in text and "'type'" not in text  # printed as Python shows a list, it was not read

    @functools.cached_property
    def _reads_none(self) -> bool:
        text = self._try([{"role": "user", "content": PROBE}, {"role": "assistant", "content": None}])
        return PROBE in text and "None" not in text

    def _try(self, messages: Sequence[Message]) -> str:
        try:
            return str(self._formatter(messages=messages).prompt)
        except Exception:
            return ""


def as_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages with a text, or None, as their content.  Raises: OptionError, a part of one is no text."""
    return [{**message, "content": _as_text(i, message.get("content"))} for i, message in enumerate(messages)]


def _as_text(index: int, content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if not isinstance(part.get("text"), str):
            raise OptionError(
                f"messages[{index}]['content'][{i}] is of type {part['type']!r}, and the chat format reads "
                "text only: leave it out, or give the model a chat_handler that reads it",
                "messages",
            )
    return "\n".join(part["text"] for part in content)


def check_choice(
    tools: Sequence[Mapping[str, Any]],
    functions: Sequence[Mapping[str, Any]],
    tool_choice: Any,
    function_call: Any,
) -> None:
    """Raise OptionError unless the function that shall be called is there and says what it takes."""
    known = {function["name"]: function for function in [*(tool["function"] for tool in tools), *functions]}
    chosen = {
        option: choice["name"]
        for option, choice in (
            ("tool_choice", tool_choice["function"] if isinstance(tool_choice, Mapping) else None),
            ("function_call", function_call),
        )
        if isinstance(choice, Mapping)
    }
    for option, name in chosen.items():
        if name not in known:
            names = ", ".join(known) or "none is given"
            raise OptionError(
                f"{option} names {name!r}: it must be one of the tools ({names})", option, "tools"
            )
        if known[name].get("parameters") is None:
            raise OptionError(
                f"{option} names {name!r}, which has no parameters: give it a JSON schema, such as "
                "dict(type='object', properties={})",
                option,
                "tools",
            )
