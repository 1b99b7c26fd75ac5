"""Tokenizing a text that is not the start of a sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Tokenizer"]

ANCHOR = "\n"


class Tokenizer:
    """Turns text into tokens, at the start of a sequence or in the middle of one.  llm : H2OLlama."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._vocab = llm.engine.context.vocab
        # SentencePiece models put a space before every text; in mid-sequence it does not belong there.
        self._adds_space = llm.metadata.get("tokenizer.ggml.model") == "llama"

    @property
    def bos_text(self) -> str:
        """The text of the token that begins every sequence; "" if the model has none."""
        vocab = self._vocab
        return str(vocab.piece(vocab.bos, special=True).decode("utf-8", "replace")) if vocab.adds_bos else ""

    def first(self, text: str, contents: Iterable[str] = ()) -> list[int]:
        """The tokens of a text that begins a sequence: BOS once, where the model wants it.

        contents : parts of the text, in order, in which names of control tokens are plain text.
        """
        head = [int(self._vocab.bos)] if self._needs_bos(text) else []
        tokens: list[int] = []
        for part, special in self._split(text, contents):
            tokens += self._encode(part, special) if not tokens else self.more(part, special=special)
        return head + tokens

    def more(self, text: str, contents: Iterable[str] = (), *, special: bool = True) -> list[int]:
        """The tokens of a text that continues a sequence.

        special : whether names of control tokens stand for them, outside `contents`.
        """
        tokens: list[int] = []
        for part, part_special in self._split(text, contents):
            tokens += self._continue(part, special and part_special)
        return tokens

    def index(self, tokens: Sequence[int], text: str, n_chars: int) -> int:
        """How many of the tokens, which are `first(text)`, it takes to spell the first n_chars characters."""
        n_todo = len(text[:n_chars].encode("utf-8"))
        for i, token in enumerate(tokens):
            if n_todo <= 0:
                return i
            if i > 0 or not self._needs_bos(text):
                n_todo -= len(self._vocab.piece(token, special=True))
        return len(tokens)

    def _needs_bos(self, text: str) -> bool:
        """Whether the model wants BOS and the template has not written it."""
        bos = self.bos_text
        return bool(self._vocab.adds_bos) and not (bos and text.startswith(bos))

    def _split(self, text: str, contents: Iterable[str]) -> list[tuple[str, bool]]:
        parts: list[tuple[str, bool]] = []
        start = 0
        for content in contents:
            at = text.find(content, start) if content else -1
            if at < 0 or self._encode(content, True) == self._encode(content, False):
                continue
            parts += [(text[start:at], True), (content, False)]
            start = at + len(content)
        parts.append((text[start:], True))
        return [(part, special) for part, special in parts if part]

    def _continue(self, text: str, special: bool) -> list[int]:
        if self._adds_space:
            anchor = self._encode(ANCHOR, False)
            tokens = self._encode(ANCHOR + text, special)
            if tokens[: len(anchor)] == anchor:
                return tokens[len(anchor) :]
        return self._encode(text, special)

    def _encode(self, text: str, special: bool) -> list[int]:
        return [
            int(token) for token in self._llm.tokenize(text.encode("utf-8"), add_bos=False, special=special)
        ]
