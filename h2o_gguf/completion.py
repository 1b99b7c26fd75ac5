"""One completion: from the tokens of a prompt to text, a piece at a time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.cancel import CancelToken
from h2o_gguf.drafts import Draft
from h2o_gguf.engine import Engine
from h2o_gguf.errors import Cancelled
from h2o_gguf.logprobs import TokenInfo, logprobs_dict, token_info
from h2o_gguf.pins import Span
from h2o_gguf.protocols import Progress
from h2o_gguf.sampling import ChainSampler, SamplingOptions
from h2o_gguf.stops import StopScanner
from h2o_gguf.text import Utf8Stream

__all__ = ["Outcome", "Piece", "Request", "Response", "complete"]

StoppingCriteria = Callable[[NDArray[np.intc], NDArray[np.float32]], bool]


@dataclass(frozen=True)
class Request:
    """What to complete, and until when.

    tokens : the prompt. n_prompt_chars : length of its text, where offsets begin.
    max_tokens : None, until the model ends or the context does.
    n_top : log probabilities to report, None for none.
    scores_prompt : report log probabilities of the prompt's tokens too.
    """

    tokens: Sequence[int]
    sampling: SamplingOptions
    max_tokens: int | None = None
    stops: Sequence[str] = ()
    criteria: StoppingCriteria | None = None
    pins: Sequence[Span] | None = None
    n_prompt_chars: int = 0
    n_top: int | None = None
    scores_prompt: bool = False
    cancel: CancelToken = field(default_factory=CancelToken)
    progress: Progress | None = None
    draft: Draft | None = None


@dataclass(frozen=True)
class Piece:
    """Text that is safe to show, and the tokens it was made of (only with log probabilities)."""

    text: str
    infos: Sequence[TokenInfo] = ()


@dataclass
class Outcome:
    """How a completion ended.

    finish_reason : "stop", "length" or "cancelled". tokens : what was generated, without the end token.
    n_reused : tokens of the prompt that were in the cache already.
    """

    finish_reason: str = "length"
    tokens: list[int] = field(default_factory=list)
    n_reused: int = 0
    prompt_infos: list[TokenInfo] = field(default_factory=list)


def complete(engine: Engine, request: Request) -> Generator[Piece, None, Outcome]:
    """Read the prompt, generate, yield text; the joined pieces are the whole text.

    Raises: what Engine.sync and a policy raise. A cancelled call ends with what it has.
    """
    outcome = Outcome()
    vocab = engine.context.vocab
    with ChainSampler(vocab, request.sampling) as sampler:
        try:
            _read_prompt(engine, request, outcome)
        except Cancelled:
            outcome.finish_reason = "cancelled"
            return outcome
        text, stops = Utf8Stream(), StopScanner(request.stops)
        infos: list[TokenInfo] = []
        n_chars = 0
        tokens = engine.generate(
            sampler, max_tokens=request.max_tokens, cancel=request.cancel, draft=request.draft
        )
        try:
            for token in tokens:
                if vocab.is_end(token) or (
                    request.criteria is not None and _criteria_met(engine, request.criteria)
                ):
                    outcome.finish_reason = "stop"
                    break
                outcome.tokens.append(token)
                if request.n_top is not None:
                    infos.append(
                        token_info(
                            token, request.n_prompt_chars + n_chars, engine.logits, request.n_top, vocab
                        )
                    )
                new = text.push(vocab.piece(token))
                n_chars += len(new)
                shown = stops.push(new)
                if shown or (infos and not stops.stopped and not stops.held and not text.held):
                    yield Piece(shown, tuple(infos))
                    infos.clear()
                if stops.stopped:
                    outcome.finish_reason = "stop"
                    break
            else:
                outcome.finish_reason = _end_reason(engine, request, outcome)
        finally:
            tokens.close()
        rest = stops.finish()
        if stops.stopped:
            outcome.finish_reason = "stop"
        if rest or (infos and not stops.stopped):
            yield Piece(rest, tuple(infos))
    return outcome


def _read_prompt(engine: Engine, request: Request, outcome: Outcome) -> None:
    if not request.scores_prompt:
        outcome.n_reused = engine.sync(
            request.tokens, pins=request.pins, progress=request.progress, cancel=request.cancel
        )
        return
    # Every position's logits are needed, so nothing in the cache can be reused.
    vocab, n_top = engine.context.vocab, request.n_top or 0
    outcome.prompt_infos = []
    n_chars = [0]
    last: list[NDArray[np.float32] | None] = [None]

    def on_logits(start: int, rows: NDArray[np.float32]) -> None:
        for i, row in enumerate(rows):
            token = request.tokens[start + i]
            if not (start + i == 0 and token == vocab.bos):
                info = token_info(token, n_chars[0], last[0], n_top, vocab)
                if not outcome.prompt_infos:
                    info = TokenInfo(info.text, info.offset)
                outcome.prompt_infos.append(info)
                n_chars[0] += len(info.text)
            last[0] = row

    before = engine.on_logits
    engine.on_logits = on_logits
    try:
        engine.reset()
        engine.sync(request.tokens, pins=request.pins, progress=request.progress, cancel=request.cancel)
    finally:
        engine.on_logits = before


def _criteria_met(engine: Engine, criteria: StoppingCriteria) -> bool:
    logits = engine.logits
    return bool(criteria(engine.token_array, logits if logits is not None else np.zeros(0, np.float32)))


def _end_reason(engine: Engine, request: Request, outcome: Outcome) -> str:
    if engine.cancelled:
        return "cancelled"
    n_max = request.max_tokens
    at_limit = (n_max is not None and len(outcome.tokens) >= n_max) or engine.n_past + 1 >= engine.n_ctx
    return "length" if at_limit else "stop"  # "stop": grammar or processors left no token


class Response:
    """OpenAI-shaped dictionaries for one completion."""

    def __init__(self, model: str, request: Request, prompt_text: str = "", suffix: str = "") -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._request = request
        self._prompt_text = prompt_text  # what `echo` puts before the text
        self._suffix = suffix

    def chunk(self, piece: Piece) -> dict[str, Any]:
        """A chunk of a stream."""
        logprobs = logprobs_dict(piece.infos) if self._request.n_top is not None else None
        return self._choice(piece.text, logprobs, None)

    def echo(self) -> dict[str, Any] | None:
        """The chunk that says the prompt, if it is to be said."""
        return self._choice(self._prompt_text, None, None) if self._prompt_text else None

    def last_chunk(self, outcome: Outcome, kv: dict[str, Any]) -> dict[str, Any]:
        """The chunk that ends a stream."""
        return {**self._choice("", None, outcome.finish_reason), "kv": kv}

    def whole(self, pieces: Iterable[Piece], outcome: Outcome, kv: dict[str, Any]) -> dict[str, Any]:
        """The result of a call that does not stream."""
        pieces = list(pieces)
        text = self._prompt_text + "".join(piece.text for piece in pieces) + self._suffix
        logprobs = None
        if self._request.n_top is not None:
            logprobs = logprobs_dict(
                [*outcome.prompt_infos, *(info for piece in pieces for info in piece.infos)]
            )
        n_prompt, n_new = len(self._request.tokens), len(outcome.tokens)
        return {
            **self._choice(text, logprobs, outcome.finish_reason),
            "usage": {
                "prompt_tokens": n_prompt,
                "completion_tokens": n_new,
                "total_tokens": n_prompt + n_new,
            },
            "kv": kv,
        }

    def _choice(
        self, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        return {**self._head, "choices": [choice]}
