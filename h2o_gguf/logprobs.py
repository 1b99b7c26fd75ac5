"""Log probabilities of tokens, in the shape of OpenAI's completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from h2o_gguf.vocab import Vocab

__all__ = ["TokenInfo", "log_softmax", "logprobs_dict", "token_info"]


@dataclass(frozen=True)
class TokenInfo:
    """One token of a text.

    text : what it spells. offset : where it begins in the text, in characters.
    logprob, top : its log probability and the most likely tokens there; None for a text's first token.
    """

    text: str
    offset: int
    logprob: float | None = None
    top: dict[str, float] | None = None


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logarithms of the softmax over the last axis: float32, same shape."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float32)


def token_info(
    token: int, offset: int, logits: NDArray[np.float32] | None, n_top: int, vocab: Vocab
) -> TokenInfo:
    """What is known of a token drawn from logits float32[n_vocab]; the token itself is always among `top`."""
    text = vocab.piece(token).decode("utf-8", "ignore")
    if logits is None:
        return TokenInfo(text, offset)
    logprobs = log_softmax(logits)
    n = min(n_top, logprobs.size)
    best = np.argpartition(-logprobs, n - 1)[:n] if n > 0 else np.zeros(0, np.intp)
    best = best[np.argsort(-logprobs[best], kind="stable")]
    top = {vocab.piece(int(i)).decode("utf-8", "ignore"): float(logprobs[i]) for i in best}
    top[text] = float(logprobs[token])
    return TokenInfo(text, offset, float(logprobs[token]), top)


def logprobs_dict(infos: Sequence[TokenInfo]) -> dict[str, Any]:
    """The `logprobs` entry of a choice."""
    return {
        "tokens": [info.text for info in infos],
        "text_offset": [info.offset for info in infos],
        "token_logprobs": [info.logprob for info in infos],
        "top_logprobs": [info.top for info in infos],
    }
