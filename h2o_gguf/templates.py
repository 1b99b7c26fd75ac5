"""The model's own chat templates; a broken one fails when it is used, not when the model loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from h2o_gguf.errors import OptionError
from h2o_gguf.native import high

__all__ = ["DEFAULT_TEMPLATE", "guess_format", "template_handlers"]

DEFAULT_TEMPLATE = "chat_template.default"
KEY = "tokenizer.chat_template"
FALLBACK_FORMAT = "llama-2"  # llama-cpp-python's, for models without a template

Handler = Callable[..., Any]


def template_handlers(
    metadata: Mapping[str, str], bos_text: str, eos_text: str, eos: int
) -> dict[str, Handler]:
    """A chat handler for every template in the model's metadata, by llama-cpp-python's names."""
    templates = {key[len(KEY) + 1 :]: text for key, text in metadata.items() if key.startswith(KEY + ".")}
    templates = {name.removeprefix("chat_template."): text for name, text in templates.items()}
    if KEY in metadata:
        templates[DEFAULT_TEMPLATE] = metadata[KEY]
    return {name: _handler(name, text, bos_text, eos_text, eos) for name, text in templates.items()}


def guess_format(metadata: Mapping[str, str]) -> str:
    """The chat format for a caller who names none."""
    guessed = high.llama_chat_format.guess_chat_format_from_gguf_metadata(metadata)
    if guessed is not None:
        return str(guessed)
    return DEFAULT_TEMPLATE if KEY in metadata else FALLBACK_FORMAT


def _handler(name: str, text: str, bos_text: str, eos_text: str, eos: int) -> Handler:
    try:
        formatter = high.llama_chat_format.Jinja2ChatFormatter(
            template=text, eos_token=eos_text, bos_token=bos_text, stop_token_ids=[eos]
        )
    except Exception as error:
        return _broken(name, error)
    handler: Handler = formatter.to_chat_handler()
    return handler


def _broken(name: str, error: Exception) -> Handler:
    reason = f"{type(error).__name__}: {error}"

    def refuse(**_: Any) -> NoReturn:
        raise OptionError(
            f"the model's chat template {name!r} cannot be read ({reason}): pass chat_format=, "
            "such as 'chatml', or a chat_handler",
            "chat_format",
        ) from error

    return refuse
