"""Writing one reply: sampled tokens become text."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from h2o_gguf.cancel import CancelToken
from h2o_gguf.stops import StopScanner
from h2o_gguf.text import Utf8Stream

__all__ = ["FinishReason", "Reply", "write_reply"]

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass
class Reply:
    """What the model has written so far.

    text : without stop string and control tokens.  tokens : all but the one that ended the reply.
    finish_reason : "stop" the model ended it; "length" a limit was reached; "cancelled" it was cut off.
    is_whole : the tokens say the text and nothing else.  is_cut_by_context : the sequence can hold no more.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason = "cancelled"
    is_whole: bool = True
    is_cut_by_context: bool = False


def write_reply(
    engine: Any,
    sampler: Any,
    reply: Reply,
    *,
    max_tokens: int | None = None,
    stops: Sequence[str] = (),
    cancel: CancelToken | None = None,
) -> Generator[str, None, None]:
    """Yield the pieces of the model's answer to what `engine` has read, and keep them in `reply`.

    Ends at a token that ends text or turn, at a stop string, after max_tokens, or when cancelled.

    max_tokens : None for as many as the model was trained to see, since a bounded cache never ends a reply.
    """
    if max_tokens is None:
        max_tokens = engine.context.n_ctx_train
    vocab = engine.context.vocab
    characters, scanner = Utf8Stream(), StopScanner(stops)
    is_said = True  # or Ctrl-C came between a token and its text
    try:
        with closing(engine.generate(sampler, max_tokens=max_tokens, cancel=cancel)) as tokens:
            for token in tokens:
                if vocab.is_end(token):
                    reply.finish_reason = "stop"
                    break
                is_said = False
                reply.tokens.append(token)
                text = scanner.push(characters.push(vocab.piece(token)))
                if scanner.stopped:
                    reply.finish_reason = "stop"
                reply.text += text
                is_said = True
                if text:
                    yield text
                if scanner.stopped:
                    return
            else:
                reply.finish_reason = "cancelled" if engine.cancelled else "length"
                reply.is_cut_by_context = not engine.cancelled and len(reply.tokens) < max_tokens
        is_said = False
        rest = scanner.finish()
        if scanner.stopped:
            reply.finish_reason = "stop"
        reply.text += rest
        is_said = True
        if rest:
            yield rest
    finally:
        # What was held back or swallowed is in the tokens, but not in the text.
        reply.is_whole = is_said and not (scanner.stopped or scanner.held or characters.held)
