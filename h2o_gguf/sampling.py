"""Choosing the next token with llama.cpp's samplers."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.checked import checked
from h2o_gguf.errors import NativeError, OptionError
from h2o_gguf.grammar import check_grammar
from h2o_gguf.kinds import Callback, Int32, Integer, Number, Text
from h2o_gguf.native import C, native_log
from h2o_gguf.options import Bias, Mirostat, PenaltyWindow, RepeatPenalty
from h2o_gguf.vocab import Vocab

__all__ = ["ChainSampler", "SamplingOptions"]

CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)], align=True)
MIROSTAT_M = 100


@checked
@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn; the names and defaults are llama-cpp-python's.

    temperature : 0 takes the most likely token; below 0 draws without any other filter.
    repeat_penalty : > 0, 1 is off. penalty_last_n : tokens the penalties look back at, 0 is off.
    seed : 32 bits; equal seeds draw equal tokens from equal logits.
    logit_bias : added to the logits of these tokens.
    logits_processors : called with (tokens so far, logits), return the logits to use.
    grammar : GBNF text and the name of its root rule.

    Raises: OptionError.
    """

    temperature: Number = 0.8
    top_k: Int32 = 40
    top_p: Number = 0.95
    min_p: Number = 0.05
    typical_p: Number = 1.0
    repeat_penalty: RepeatPenalty = 1.0
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    penalty_last_n: PenaltyWindow = 64
    mirostat_mode: Mirostat = 0
    mirostat_tau: Number = 5.0
    mirostat_eta: Number = 0.1
    seed: Integer = 0
    logit_bias: Bias = field(default_factory=dict)
    logits_processors: Sequence[Callback] = ()
    grammar: tuple[Text, Text] | None = None

    def __post_init__(self) -> None:
        if self.grammar is not None:
            check_grammar(self.grammar[0])


class ChainSampler:
    """One generation's sampler: a llama.cpp sampler chain, and a grammar beside it."""

    def __init__(self, vocab: Vocab, options: SamplingOptions) -> None:
        self._vocab = vocab
        self._options = options
        self._chain: Any = None
        self._grammar: Any = None
        for token in options.logit_bias:
            if not 0 <= token < vocab.n_tokens:
                raise OptionError(
                    f"logit_bias names token {token}, the vocabulary has {vocab.n_tokens}", "logit_bias"
                )
        if options.grammar is not None:
            self._grammar = self._make_grammar(*options.grammar)
        self._chain = self._make_chain()
        self._candidates = np.empty(vocab.n_tokens, CANDIDATE)

    def sample(self, logits: NDArray[np.float32], tokens: NDArray[np.intc]) -> int | None:
        """A token, from logits float32[n_vocab] and the tokens so far; None if none is allowed.

        Raises: NativeError, the logits are not numbers; OptionError, a processor returned a wrong shape.
        """
        if np.isnan(logits.max()):
            raise NativeError(
                "the model computed logits that are not numbers: its weights or its cache are damaged"
            )
        logits = self._process(logits, tokens)
        if self._grammar is None:
            return self._draw(logits)
        # Most tokens the model wants are legal: ask the grammar about one, and about all only if it says no.
        token = self._draw(logits)
        if token is not None and self._grammar_allows(token):
            return token
        return self._draw(self._grammar_filter(logits))

    def accept(self, token: int) -> None:
        """Tell penalties and grammar that the token was chosen."""
        if self._grammar is not None:
            C.llama_sampler_accept(self._grammar, token)
        C.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        """Free the native samplers; may be called twice."""
        chain, self._chain = self._chain, None
        grammar, self._grammar = self._grammar, None
        for sampler in (chain, grammar):
            if sampler is not None:
                C.llama_sampler_free(sampler)

    def __enter__(self) -> ChainSampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _process(self, logits: NDArray[np.float32], tokens: NDArray[np.intc]) -> NDArray[np.float32]:
        options = self._options
        if not options.logit_bias and not options.logits_processors:
            return logits
        logits = logits.copy()
        if options.logits_processors:
            for processor in options.logits_processors:
                logits = np.array(processor(tokens, logits), np.float32)
                if logits.shape != (self._vocab.n_tokens,):
                    raise OptionError(
                        f"a logits processor returned shape {logits.shape}, not ({self._vocab.n_tokens},)",
                        "logits_processor",
                    )
        for token, bias in options.logit_bias.items():
            logits[token] += bias
        if np.isnan(logits).any():
            raise OptionError(
                "a logits processor or a bias made logits that are not numbers", "logits_processor"
            )
        return logits

    def _draw(self, logits: NDArray[np.float32]) -> int | None:
        if logits.max() == -np.inf:
            return None
        self._fill(logits)
        array = self._array(self._candidates)
        C.llama_sampler_apply(self._chain, ctypes.byref(array))
        if not 0 <= array.selected < array.size:
            raise NativeError("the samplers chose no token")
        chosen = array.data[array.selected]  # a sampler may have replaced the buffer
        return int(chosen.id) if chosen.logit > -math.inf else None

    def _fill(self, logits: NDArray[np.float32]) -> None:
        self._candidates["id"] = np.arange(logits.size, dtype=np.int32)
        self._candidates["logit"] = logits
        self._candidates["p"] = 0.0

    @staticmethod
    def _array(candidates: NDArray[Any]) -> Any:
        data = candidates.ctypes.data_as(C.llama_token_data_p)
        return C.llama_token_data_array(data=data, size=candidates.size, selected=-1, sorted=False)

    def _grammar_allows(self, token: int) -> bool:
        one = np.array([(token, 1.0, 0.0)], CANDIDATE)
        array = self._array(one)
        C.llama_sampler_apply(self._grammar, ctypes.byref(array))
        return bool(one["logit"][0] > -np.inf)

    def _grammar_filter(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        self._fill(logits)
        array = self._array(self._candidates)
        C.llama_sampler_apply(self._grammar, ctypes.byref(array))
        filtered: NDArray[np.float32] = self._candidates["logit"].copy()
        return filtered

    def _make_grammar(self, text: str, root: str) -> Any:
        with native_log() as log:
            grammar = C.llama_sampler_init_grammar(self._vocab.pointer, text.encode(), root.encode())
        if not grammar:
            raise OptionError(
                f"the grammar cannot be read: {log.reason('llama.cpp gives no reason')}", "grammar"
            )
        return grammar

    def _make_chain(self) -> Any:
        o = self._options
        chain = C.llama_sampler_chain_init(C.llama_sampler_chain_default_params())
        parts = [
            C.llama_sampler_init_penalties(
                self._vocab.n_tokens,
                o.penalty_last_n,
                o.repeat_penalty,
                o.frequency_penalty,
                o.presence_penalty,
            )
        ]
        seed = o.seed & 0xFFFFFFFF
        if o.temperature == 0:
            parts.append(C.llama_sampler_init_greedy())
        elif o.temperature < 0:
            parts.append(C.llama_sampler_init_dist(seed))
        elif o.mirostat_mode == 1:
            parts.append(C.llama_sampler_init_temp(o.temperature))
            parts.append(
                C.llama_sampler_init_mirostat(
                    self._vocab.n_tokens, seed, o.mirostat_tau, o.mirostat_eta, MIROSTAT_M
                )
            )
        elif o.mirostat_mode == 2:
            parts.append(C.llama_sampler_init_temp(o.temperature))
            parts.append(C.llama_sampler_init_mirostat_v2(seed, o.mirostat_tau, o.mirostat_eta))
        else:
            parts.append(C.llama_sampler_init_top_k(o.top_k))
            parts.append(C.llama_sampler_init_typical(o.typical_p, 1))
            parts.append(C.llama_sampler_init_top_p(o.top_p, 1))
            parts.append(C.llama_sampler_init_min_p(o.min_p, 1))
            parts.append(C.llama_sampler_init_temp(o.temperature))
            parts.append(C.llama_sampler_init_dist(seed))
        for part in parts:
            C.llama_sampler_chain_add(chain, part)
        return chain
