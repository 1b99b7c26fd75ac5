"""Messages to text, by the model's own chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from h2o_gguf.errors import MODEL_FILE, H2OError

__all__ = ["ChatTemplate", "ChatTemplateError", "Message"]

Message = Mapping[str, str]

KEY = "tokenizer.chat_template"


class ChatTemplateError(H2OError, ValueError):
    """The model's chat template cannot be read, or refuses these messages.  reason : its words."""

    exit_code = MODEL_FILE

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"the chat template inside the model file cannot be used: {reason}; "
            "use the model without it (`run --raw`), or another model"
        )
        self.reason = reason


class ChatTemplate:
    """Renders messages as the model was trained to read them.

    source : the Jinja text, "" for a plain layout that suits models which have none.
    is_own : whether the model brought it.  is_raw : messages are joined, and control tokens in them count.
    stops : strings that end a reply.
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "", is_raw: bool = False) -> None:
        self.source = source
        self.is_own = bool(source)
        self.is_raw = is_raw
        self.stops: tuple[str, ...] = () if source or is_raw else ("\nUser:",)
        self._bos = bos
        self._eos = eos
        self._formatter: Any = (
            None  # built on first use: a broken template must not keep a model from loading
        )

    @classmethod
    def of(cls, llm: Any) -> ChatTemplate:
        """The template of a loaded model.  llm : H2OLlama."""
        vocab = llm.engine.context.vocab

        def text(token: int) -> str:
            return str(vocab.piece(token, special=True).decode("utf-8", "replace")) if token >= 0 else ""

        return cls(llm.metadata.get(KEY, ""), bos=text(vocab.bos), eos=text(vocab.eos))

    @classmethod
    def raw(cls) -> ChatTemplate:
        """No template: the text is continued as it is."""
        return cls("", is_raw=True)

    def render(self, messages: Sequence[Message], *, opens_reply: bool) -> str:
        """The text of the conversation; opens_reply : followed by the words that open the model's next reply.

        A system message moves into the first user message where the template has no place for one.

        Raises: ChatTemplateError.
        """
        if self.is_raw:
            return "".join(message["content"] for message in messages)
        if not self.is_own:
            return _plain(messages, opens_reply)
        try:
            return self._jinja(messages, opens_reply)
        except ChatTemplateError:
            if not messages or messages[0]["role"] != "system":
                raise
            return self._jinja(_without_system(messages), opens_reply)

    def opening(self, system: str | None) -> str:
        """What comes before the first user message, whatever that says: system message and markers."""
        start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        one, other = (
            self.render([*start, {"role": "user", "content": word}], opens_reply=True) for word in ("A", "B")
        )
        n = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))
        return one[:n]

    def _jinja(self, messages: Sequence[Message], opens_reply: bool) -> str:
        try:
            if self._formatter is None:
                self._formatter = _formatter(self.source, self._bos, self._eos)
            self._formatter.add_generation_prompt = opens_reply
            return str(self._formatter(messages=[dict(message) for message in messages]).prompt)
        except Exception as error:  # a template is a program of its author's
            raise ChatTemplateError(str(error) or type(error).__name__) from error


def _formatter(source: str, bos: str, eos: str) -> Any:
    from h2o_gguf.native import high

    return high.llama_chat_format.Jinja2ChatFormatter(template=source, eos_token=eos, bos_token=bos)


def _without_system(messages: Sequence[Message]) -> list[Message]:
    system, *rest = messages
    if not rest or rest[0]["role"] != "user":
        return [{"role": "user", "content": system["content"]}, *rest]
    first = {"role": "user", "content": f"{system['content']}\n\n{rest[0]['content']}"}
    return [first, *rest[1:]]


def _plain(messages: Sequence[Message], opens_reply: bool) -> str:
    names = {"user": "User: ", "assistant": "Assistant: ", "system": ""}
    lines = [f"{names.get(message['role'], '')}{message['content']}\n" for message in messages]
    return "".join(lines) + ("Assistant:" if opens_reply else "")
