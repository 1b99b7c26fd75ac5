"""The model's vocabulary: special tokens and the bytes of each token."""

from __future__ import annotations

import ctypes
from typing import Any

from h2o_gguf.errors import OptionError
from h2o_gguf.native import C

__all__ = ["Vocab"]

NO_TOKEN = -1


class Vocab:
    """Tokens of a loaded model.  model : llama_model pointer, which must outlive this object."""

    def __init__(self, model: Any) -> None:
        self._vocab = C.llama_model_get_vocab(model)
        self.n_tokens = int(C.llama_vocab_n_tokens(self._vocab))
        self.bos = int(C.llama_vocab_bos(self._vocab))
        self.eos = int(C.llama_vocab_eos(self._vocab))
        self.fim_prefix = int(C.llama_vocab_fim_pre(self._vocab))
        self.fim_suffix = int(C.llama_vocab_fim_suf(self._vocab))
        self.fim_middle = int(C.llama_vocab_fim_mid(self._vocab))
        self.adds_bos = bool(C.llama_vocab_get_add_bos(self._vocab)) and self.bos != NO_TOKEN
        self.adds_eos = bool(C.llama_vocab_get_add_eos(self._vocab)) and self.eos != NO_TOKEN
        self._pieces: dict[tuple[int, bool], bytes] = {}

    @property
    def pointer(self) -> Any:
        """The llama_vocab pointer."""
        return self._vocab

    def is_control(self, token: int) -> bool:
        """Whether the token stands for no text of its own."""
        return bool(C.llama_vocab_is_control(self._vocab, token)) or self.is_end(token)

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation (end of text, end of turn)."""
        return bool(C.llama_vocab_is_eog(self._vocab, token))

    def piece(self, token: int, special: bool = False) -> bytes:
        """The bytes of a token; control tokens have none unless `special`."""
        key = token, special
        if key not in self._pieces:
            self._pieces[key] = self._native_piece(*key)
        return self._pieces[key]

    def text_piece(self, token: int) -> bytes | None:
        """The bytes of a text token; None for control tokens and tokens out of range."""
        if not 0 <= token < self.n_tokens or self.is_control(token):
            return None
        return self.piece(token, special=True)

    def check(self, tokens: Any) -> None:
        """Raise OptionError unless every token is in the vocabulary, which llama.cpp takes for granted."""
        for index, token in enumerate(tokens):
            if not 0 <= token < self.n_tokens:
                raise OptionError(
                    f"token {token} at index {index} is not in the vocabulary of {self.n_tokens} tokens: "
                    "pass tokens of this model",
                    "prompt",
                )

    def _native_piece(self, token: int, special: bool) -> bytes:
        if not 0 <= token < self.n_tokens:
            return b""
        size = 64
        while True:
            buffer = (ctypes.c_char * size)()
            n = C.llama_token_to_piece(self._vocab, C.llama_token(token), buffer, size, 0, special)
            if n >= 0:
                return bytes(buffer.raw[:n])
            size = -n
