"""The tokens of a prompt: BOS exactly once, fill-in-the-middle, pinned text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from h2o_gguf.errors import OptionError
from h2o_gguf.pins import Span
from h2o_gguf.vocab import NO_TOKEN, Vocab

__all__ = ["completion_tokens", "find_text", "has_infill", "one_bos"]

Tokenize = Callable[[bytes, bool, bool], list[int]]  # text, add_bos, special


def has_infill(vocab: Vocab) -> bool:
    """Whether the model knows fill-in-the-middle."""
    return vocab.fim_prefix != NO_TOKEN and vocab.fim_suffix != NO_TOKEN


def one_bos(tokens: Sequence[int], vocab: Vocab) -> list[int]:
    """The tokens with BOS exactly once at index 0, for models that want it; else as they are."""
    rest = list(tokens)
    if vocab.adds_bos:
        while rest[:1] == [vocab.bos]:
            del rest[0]
        rest.insert(0, vocab.bos)
    return rest


def completion_tokens(
    prompt: str | Sequence[int],
    suffix: str | None,
    vocab: Vocab,
    tokenize: Tokenize,
    *,
    suffix_first: bool = False,
) -> list[int]:
    """The tokens to complete.

    prompt : text, in which the names of control tokens count as these tokens; or tokens, taken as they are.
    suffix : text that follows the gap, for models that know fill-in-the-middle; ignored by others here.
    suffix_first : the order suffix, prefix, middle.

    Raises: OptionError, there is nothing to complete.
    """
    if suffix is not None and has_infill(vocab):
        return _infill(prompt, suffix, vocab, tokenize, suffix_first)
    if not isinstance(prompt, str):
        tokens = [int(token) for token in prompt]
    else:
        tokens = tokenize(prompt.encode(), False, True) if prompt else []
        tokens = one_bos(tokens, vocab)
        if vocab.adds_eos and prompt:
            tokens.append(vocab.eos)
    if not tokens:
        tokens = [token for token in (vocab.bos, vocab.eos) if token != NO_TOKEN][:1]
    if not tokens:
        raise OptionError("the prompt is empty and the model has no token to begin a text with", "prompt")
    return tokens


def _infill(
    prompt: str | Sequence[int], suffix: str, vocab: Vocab, tokenize: Tokenize, suffix_first: bool
) -> list[int]:
    before = tokenize(prompt.encode(), False, False) if isinstance(prompt, str) else [int(t) for t in prompt]
    after = tokenize(suffix.encode(), False, False) if suffix else []
    head = [vocab.fim_prefix, *before]
    tail = [vocab.fim_suffix, *after]
    middle = [vocab.fim_middle] if vocab.fim_middle != NO_TOKEN else []
    return one_bos([*(tail + head if suffix_first else head + tail), *middle], vocab)


def find_text(tokens: Sequence[int], text: str, vocab: Vocab) -> Span | None:
    """The tokens that spell `text`, which must occur in what `tokens` spell; None if it does not.

    A token that spells only a part of the text is included, and so are the control tokens right behind it.
    """
    wanted = text.strip().encode()
    pieces = [vocab.piece(token, special=True) for token in tokens]
    at = b"".join(pieces).find(wanted)
    if at < 0 or not wanted:
        return None
    start = end = None
    offset = 0
    for index, piece in enumerate(pieces):
        if start is None and offset + len(piece) > at:
            start = index
        offset += len(piece)
        if offset >= at + len(wanted):
            end = index + 1
            break
    assert start is not None and end is not None
    while end < len(tokens) and vocab.is_control(tokens[end]):
        end += 1
        if vocab.is_end(tokens[end - 1]):
            break
    return start, end
