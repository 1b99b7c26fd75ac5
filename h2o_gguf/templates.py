"""Chat formats: the model's own templates, and llama-cpp-python's.

A broken template fails when it is used, not when the model loads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from h2o_gguf.errors import OptionError, in_short
from h2o_gguf.messages import FittingFormatter, as_texts
from h2o_gguf.native import high

__all__ = ["chat_handlers", "check_format", "guess_format", "template_names"]

DEFAULT_TEMPLATE = "chat_template.default"
KEY = "tokenizer.chat_template"
FALLBACK_FORMAT = "llama-2"  # llama-cpp-python's, for models without a template
ROLES = ("system", "user", "assistant", "tool", "function")  # its formats leave out messages of others

Handler = Callable[..., Any]


def template_names(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The keys of the templates in a model's metadata, by llama-cpp-python's names for them."""
    names = {
        key[len(KEY) + 1 :].removeprefix("chat_template."): key
        for key in metadata
        if key.startswith(KEY + ".")
    }
    return names | ({DEFAULT_TEMPLATE: KEY} if KEY in metadata else {})


def chat_handlers(metadata: Mapping[str, str], bos_text: str, eos_text: str, eos: int) -> dict[str, Handler]:
    """A chat handler for every format: the templates in the model's metadata, then llama-cpp-python's own."""
    own = {
        name: _handler(name, metadata[key], bos_text, eos_text, eos)
        for name, key in template_names(metadata).items()
    }
    theirs = {
        name: _of_texts(name, handler)
        for name, handler in sorted(_registered().items())
        if handler.__module__ == high.llama_chat_format.__name__ and name not in own
    }
    return own | theirs


def check_format(name: str | None, own: Iterable[str]) -> None:
    """Raise OptionError unless the model or llama-cpp-python has a format of that name."""
    known = [*own, *sorted(_registered())]
    if name not in known:
        raise OptionError(
            f"chat_format is {name!r}: it can be {', '.join(dict.fromkeys(known))}", "chat_format"
        )


def guess_format(metadata: Mapping[str, str]) -> str:
    """The chat format for a caller who names none."""
    guessed = high.llama_chat_format.guess_chat_format_from_gguf_metadata(metadata)
    if guessed is not None:
        return str(guessed)
    return DEFAULT_TEMPLATE if KEY in metadata else FALLBACK_FORMAT


def _registered() -> dict[str, Handler]:
    """llama-cpp-python's formats, and what users have added to them."""
    handlers: dict[str, Handler] = high.llama_chat_format.LlamaChatCompletionHandlerRegistry()._chat_handlers
    return handlers


def _of_texts(name: str, handler: Handler) -> Handler:
    """The handler, which leaves out what it cannot read, with all contents as texts and no unknown role."""

    @functools.wraps(handler)
    def handle(*, messages: Any, **options: Any) -> Any:
        for i, message in enumerate(messages):
            if message["role"].lower() not in ROLES:
                raise OptionError(
                    f"messages[{i}]['role'] is {message['role']!r}: the chat format {name!r} knows "
                    f"{', '.join(ROLES)}",
                    "messages",
                )
        return handler(messages=as_texts(messages), **options)

    return handle


def _handler(name: str, text: str, bos_text: str, eos_text: str, eos: int) -> Handler:
    try:
        formatter = high.llama_chat_format.Jinja2ChatFormatter(
            template=text, eos_token=eos_text, bos_token=bos_text, stop_token_ids=[eos]
        )
    except Exception as error:
        return _broken(name, error)
    handler: Handler = high.llama_chat_format.chat_formatter_to_chat_completion_handler(
        FittingFormatter(formatter)
    )
    return handler


def _broken(name: str, error: Exception) -> Handler:
    reason = in_short(error)

    def refuse(**_: Any) -> NoReturn:
        raise OptionError(
            f"the model's chat template {name!r} cannot be read ({reason}): pass chat_format=, "
            "such as 'chatml', or a chat_handler",
            "chat_format",
        ) from error

    return refuse
