"""The chat session and the summarizer's tokenizing on a real model."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llama_harness import english, open_llama

from h2o_gguf.cancel import CancelToken
from h2o_gguf.chat import ChatSession
from h2o_gguf.documents import Document
from h2o_gguf.errors import Cancelled
from h2o_gguf.pieces import Tokenizer
from h2o_gguf.sampling import SamplingOptions

GREEDY = SamplingOptions(temperature=0.0)


@pytest.fixture
def llm() -> Iterator[Any]:
    with open_llama(kv_budget=256, n_ubatch=64, n_threads=1) as opened:
        yield opened


def positions(llm: Any) -> Any:
    """int32[n_layer, n_head_kv, n_cells]"""
    return np.array(llm.engine.cache.pos)


def test_20_turns_in_a_budget_of_256_keep_the_system_message_in_every_head(llm: Any) -> None:
    session = ChatSession(llm, system="You are a kind assistant named Bo.", sampling=GREEDY, max_tokens=12)
    for i in range(20):
        assert "".join(session.ask(f"Say something about the number {i}."))
        assert session.report().used <= 256
    assert session.report().evicted > 256
    ((start, end),) = llm.engine.pins
    text = llm.detokenize(llm.engine.tokens[start:end], special=True).decode()
    assert text == "<|im_start|>system\nYou are a kind assistant named Bo.<|im_end|>\n<|im_start|>user\n"
    kept = positions(llm)
    for position in range(start, end):
        assert (kept == position).any(axis=2).all()
    assert len(session.messages) == 41


def test_regenerate_inside_the_recent_window_reads_nothing_and_says_the_same(llm: Any) -> None:
    session = ChatSession(llm, sampling=GREEDY, max_tokens=12)
    for i in range(12):
        reply = "".join(session.ask(f"Say something long about the number {i}."))
    assert session.report().evicted > 0
    assert "".join(session.regenerate()) == reply
    assert session.last is not None and session.last.n_read == 0


def test_regenerate_beyond_the_recent_window_reads_the_conversation_again(llm: Any) -> None:
    session = ChatSession(llm, sampling=GREEDY, max_tokens=150)
    n_past = 0
    for _ in range(2):
        "".join(session.ask("Tell me a long story about the sea, a fox and a lighthouse."))
        n_past = llm.engine.n_past
    assert "".join(session.regenerate())
    assert session.last is not None and session.last.n_read + session.last.n_reused <= n_past
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2


@pytest.mark.parametrize("attic", ["off", "ram"])
def test_a_cancelled_document_leaves_the_conversation_as_it_was(attic: str) -> None:
    with open_llama(kv_budget=256, n_ubatch=64, n_threads=1, attic=attic) as llm:
        cancel_a_document(llm)


def cancel_a_document(llm: Any) -> None:
    replies = []
    for is_cancelled in (False, True):
        session = ChatSession(llm, sampling=GREEDY, max_tokens=12)
        llm.engine.reset()
        for i in range(10):
            list(session.ask(f"Say something about the number {i}."))
        if is_cancelled:
            cancel = CancelToken()

            def stop(n: int, _: int, cancel: CancelToken = cancel) -> None:
                if n > 400:
                    cancel.cancel()

            before = session.report()
            with pytest.raises(Cancelled):
                list(session.ask(english(8_000), progress=stop, cancel=cancel))
            after = session.report()
            assert (after.n_past, after.used, after.evicted) == (before.n_past, before.used, before.evicted)
            if before.attic is not None and after.attic is not None:
                assert after.attic.entries == before.attic.entries > 0
        replies.append("".join(session.ask("And now?")))
        assert session.last is not None and session.last.n_reused > 256
    assert replies[0] == replies[1]


@pytest.mark.parametrize("n_chars", [200, 1_000, 5_000])
def test_a_text_in_pieces_has_the_tokens_of_the_whole(llm: Any, n_chars: int) -> None:
    text = english(40_000)
    tokenizer = Tokenizer(llm)
    document = Document(io.BytesIO(text.encode()), "text", None)
    tokens = [t for piece in document.pieces(n_chars) for t in tokenizer.more(piece, special=False)]
    assert tokens == tokenizer.more(text, special=False)
