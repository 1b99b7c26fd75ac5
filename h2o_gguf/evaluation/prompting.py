"""From a sample to tokens: the model's chat template, parted where the question begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from h2o_gguf.chat_template import ChatTemplate
from h2o_gguf.evaluation.sample import Sample
from h2o_gguf.prompt import one_bos

if TYPE_CHECKING:
    from h2o_gguf.llama import H2OLlama

__all__ = ["Prompt", "Prompter", "Template"]

ROOM = 16  # tokens of an answer beside twice those of the expected strings
BREAK = "\n\n"


@dataclass(frozen=True)
class Prompt:
    """A sample in tokens.

    context : before the question. question : from there on, the reply's first words included.
    n_answer : most tokens of the answer. pin : span of the context that is never evicted, if it fits.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]
    n_answer: int
    pin: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.context) + len(self.question) + self.n_answer


class Template(Protocol):
    """What renders messages."""

    def render(self, messages: list[dict[str, str]], *, opens_reply: bool) -> str: ...


class Prompter:
    """Makes prompts for one model.

    template : renders the messages. tokenize : tokens of a text, control tokens by their names.
    begin : what a whole prompt begins with, such as one BOS.
    """

    def __init__(
        self,
        template: Template | ChatTemplate,
        tokenize: Callable[[str], list[int]],
        begin: Callable[[list[int]], list[int]] = list,
    ) -> None:
        self._template, self._tokenize, self._begin = template, tokenize, begin

    @classmethod
    def of(cls, llm: H2OLlama) -> Prompter:
        """For a loaded model."""
        vocab = llm.engine.context.vocab
        return cls(
            ChatTemplate.of(llm),
            lambda text: llm.tokenize(text.encode(), False, True),
            lambda tokens: one_bos(tokens, vocab),
        )

    def prompt(self, sample: Sample) -> Prompt:
        """The tokens of a sample."""
        before, after = self._texts(sample)
        expected = ", ".join(check.text for check in sample.checks)
        return Prompt(
            tuple(self._begin(self._tokenize(before))),
            tuple(self._tokenize(after)),
            ROOM + 2 * len(self._tokenize(expected)),
            self._pin(sample, before),
        )

    def _pin(self, sample: Sample, before: str) -> tuple[int, int]:
        """The tokens of the first message, which the text before the question may have in it."""
        if not sample.pins_system:
            return 0, 0
        _, message = sample.history[0]
        start = before.index(message)
        first, end = (len(self._begin(self._tokenize(before[:at]))) for at in (start, start + len(message)))
        return first, end

    def count(self, sample: Sample) -> int:
        """Tokens of a sample and its answer."""
        return len(self.prompt(sample))

    def _texts(self, sample: Sample) -> tuple[str, str]:
        content = f"{sample.context}{BREAK}{sample.question}" if sample.context else sample.question
        messages = [{"role": role, "content": text} for role, text in (*sample.history, ("user", content))]
        text = self._template.render(messages, opens_reply=True)
        at = text.rindex(sample.question)
        # Most templates end with a newline, some with a word.
        glue = " " if sample.prefix and not text[-1:].isspace() and text[-1:] != ">" else ""
        return text[:at], f"{text[at:]}{glue}{sample.prefix}"
