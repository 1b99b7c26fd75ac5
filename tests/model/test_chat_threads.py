"""A chat and a summary share the model with other threads."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from llama_harness import english, open_llama

from h2o_gguf.chat import ChatSession
from h2o_gguf.documents import Document
from h2o_gguf.errors import Cancelled, ClosedError
from h2o_gguf.sampling import SamplingOptions
from h2o_gguf.summarize import summarize

GREEDY = SamplingOptions(temperature=0.0)


@pytest.fixture
def llm() -> Iterator[Any]:
    with open_llama(kv_budget=256, n_ubatch=64) as opened:
        yield opened


def chat(llm: Any, meanwhile: Callable[[], object]) -> tuple[ChatSession, list[BaseException]]:
    """A long reply; `meanwhile` runs in another thread once it has begun."""
    session = ChatSession(llm, sampling=GREEDY, max_tokens=60)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            meanwhile()
        except BaseException as error:
            errors.append(error)

    other = threading.Thread(target=work)
    try:
        for i, _ in enumerate(session.ask("Tell me a long story about the sea.")):
            if i == 2:
                other.start()
    except ClosedError as error:
        errors.append(error)
    other.join(60)
    assert not other.is_alive()
    return session, errors


def test_close_ends_a_chat_of_another_thread(llm: Any) -> None:
    session, errors = chat(llm, llm.close)
    assert all(isinstance(error, ClosedError) for error in errors)
    assert session.last is not None and session.last.finish_reason == "cancelled"
    for use in (session.ask("And then?"), session.regenerate()):
        with pytest.raises(ClosedError):
            next(use)


def test_cancel_ends_the_reply_of_another_thread_and_the_chat_goes_on(llm: Any) -> None:
    session, errors = chat(llm, llm.cancel)
    assert errors == []
    assert session.last is not None and session.last.finish_reason == "cancelled"
    assert session.last.n_written < 60
    assert "".join(session.ask("And then?"))


def test_a_second_call_waits_for_the_reply(llm: Any) -> None:
    alone = llm.create_completion("Water is made of", temperature=0, max_tokens=6)["choices"][0]["text"]
    texts: list[str] = []
    session, errors = chat(
        llm,
        lambda: texts.append(
            llm.create_completion("Water is made of", temperature=0, max_tokens=6)["choices"][0]["text"]
        ),
    )
    assert errors == [] and texts == [alone]
    assert session.last is not None and session.last.finish_reason != "cancelled"


def test_close_and_cancel_stop_a_summary_while_it_reads(llm: Any) -> None:
    for stop in (llm.cancel, llm.close):
        other = threading.Thread(target=stop)
        document = Document(io.BytesIO(english(20_000).encode()), "text", None)
        started = threading.Event()

        def progress(_: Any, other: threading.Thread = other, started: threading.Event = started) -> None:
            if not started.is_set():
                started.set()
                other.start()

        with pytest.raises((Cancelled, ClosedError)):
            summarize(llm, document, max_tokens=4, progress=progress)
        other.join(60)
        assert not other.is_alive()
