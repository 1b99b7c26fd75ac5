"""Cancel, threads, streams closed early, closing, and leaving the interpreter."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from llama_harness import english, model_path, open_llama, open_tiny

from h2o_gguf.cancel import CancelToken
from h2o_gguf.errors import BusyError, Cancelled, ClosedError

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8}


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with open_llama(kv_budget=512, n_batch=128) as llama:
        yield llama


@pytest.fixture(scope="module")
def tokens(llm: Any) -> list[int]:
    return list(llm.tokenize(english(20_000).encode()))[:3000]


def test_cancel_from_another_thread_returns_within_a_batch_and_the_next_call_is_right(
    llm: Any, tokens: list[int]
) -> None:
    expected = llm(tokens[:200], **GREEDY)["choices"][0]["text"]
    llm.reset()
    batches: list[float] = []
    cancelled_at: list[float] = []

    def progress(done: int, total: int) -> None:
        batches.append(time.monotonic())

    def cancel_in_the_middle_of_a_batch() -> None:
        while len(batches) < 3:
            time.sleep(0.001)
        time.sleep((batches[2] - batches[0]) / 4)
        cancelled_at.append(time.monotonic())
        llm.cancel()

    thread = threading.Thread(target=cancel_in_the_middle_of_a_batch)
    thread.start()
    result = llm(tokens, progress=progress, **GREEDY)
    returned_after = time.monotonic() - cancelled_at[0]
    thread.join()
    assert result["choices"][0]["finish_reason"] == "cancelled" and result["choices"][0]["text"] == ""
    one_batch = max(b - a for a, b in itertools.pairwise(batches))
    assert returned_after < one_batch + 0.1
    assert 0 < llm.engine.n_past < 3000 and llm.engine.n_past % 128 == 0
    assert llm.engine.tokens == tokens[: llm.engine.n_past]
    assert llm(tokens[:200], **GREEDY)["choices"][0]["text"] == expected


def test_a_cancelled_stream_ends_with_what_it_has(llm: Any) -> None:
    cancel = CancelToken()
    chunks = []
    for chunk in llm("Once upon a time", stream=True, temperature=0, max_tokens=50, cancel=cancel):
        chunks.append(chunk)
        if len(chunks) == 3:
            cancel.cancel()
    assert chunks[-1]["choices"][0]["finish_reason"] == "cancelled"
    assert len(chunks) == 4 and "kv" in chunks[-1]


def test_cancel_while_nothing_runs_does_not_cancel_the_next_call(llm: Any) -> None:
    llm.cancel()
    assert llm("Hello", **GREEDY)["choices"][0]["finish_reason"] != "cancelled"


def test_eval_says_that_it_was_cancelled(llm: Any, tokens: list[int]) -> None:
    llm.reset()
    thread = threading.Timer(0.3, llm.cancel)
    thread.start()
    with pytest.raises(Cancelled):
        llm.eval(tokens * 3)
    thread.join()
    assert llm.n_tokens == llm.engine.context.n_past() < 9000


def test_calls_of_several_threads_are_served_one_after_the_other(llm: Any) -> None:
    prompts = ["The capital of France is", "Water is made of", "Two and two is"]
    expected = [llm(p, **GREEDY)["choices"][0]["text"] for p in prompts]
    got: dict[int, str] = {}

    def work(i: int) -> None:
        if i % 2:
            chunks = llm(prompts[i % 3], stream=True, **GREEDY)
            got[i] = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        else:
            got[i] = llm(prompts[i % 3], **GREEDY)["choices"][0]["text"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(6)] == [expected[i % 3] for i in range(6)]


def test_a_stream_closed_early_lets_the_next_call_in(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._lock, "patience_s", 0.2)
    expected = llm("Hello", **GREEDY)["choices"]
    for chunk in llm("Tell me a story", stream=True, temperature=0, max_tokens=50):
        assert chunk["choices"]
        break
    assert llm("Hello", **GREEDY)["choices"] == expected
    stream = llm("Tell me a story", stream=True, temperature=0, max_tokens=50)
    next(stream)
    with pytest.raises(BusyError, match="open stream"):
        llm("Hello", **GREEDY)
    stream.close()
    assert llm("Hello", **GREEDY)["choices"] == expected


def test_streams_read_by_a_thread_pool_and_calls_in_it_wait_for_each_other(llm: Any) -> None:
    expected = llm("Water is made of", **GREEDY)["choices"][0]["text"]
    turn_taken = threading.Event()
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as two:
        stream = llm("Water is made of", stream=True, **GREEDY)
        texts = [one.submit(next, stream).result()["choices"][0]["text"]]

        def call() -> str:
            turn_taken.set()
            return str(llm("Water is made of", **GREEDY)["choices"][0]["text"])

        called = one.submit(call)  # the thread that read the stream last
        assert turn_taken.wait(10)
        while (chunk := two.submit(next, stream, None).result()) is not None:
            texts.append(chunk["choices"][0]["text"])
        assert called.result(60) == "".join(texts) == expected


def test_a_stream_nobody_started_holds_nothing(llm: Any) -> None:
    stream = llm("Tell me a story", stream=True, max_tokens=5)
    assert llm("Hello", **GREEDY)["choices"]
    stream.close()


def test_ctrl_c_in_a_prompt_leaves_the_object_right(llm: Any, tokens: list[int]) -> None:
    expected = llm(tokens[:300], **GREEDY)["choices"][0]["text"]
    llm.reset()

    def interrupt(done: int, total: int) -> None:
        if done >= 256:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm(tokens, progress=interrupt, **GREEDY)
    assert llm.engine.n_past == llm.engine.context.n_past() == 256
    assert llm(tokens[:300], **GREEDY)["choices"][0]["text"] == expected


def test_closing_twice_is_fine_and_every_use_after_it_is_a_closed_error(tmp_path: Path) -> None:
    llama = open_tiny("llama", tmp_path, kv_budget=100)
    stream = llama("abc", stream=True, max_tokens=20)
    next(stream)
    llama.close()
    llama.close()
    uses: list[Any] = [
        lambda: next(stream), lambda: llama("a"), lambda: llama("a", stream=True), lambda: llama.eval([5]),
        lambda: llama.tokenize(b"a"), lambda: llama.detokenize([5]), llama.reset, llama.save_state,
        lambda: llama.create_chat_completion([{"role": "user", "content": "a"}]), llama.sample,
        lambda: llama.n_vocab(), lambda: llama.token_eos(), lambda: next(llama.generate([5])),
        lambda: llama.embed("a"), llama.kv_report,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(ClosedError):
            use()


def test_closing_from_another_thread_cancels_the_running_call() -> None:
    llama = open_llama(kv_budget=512, n_batch=128)
    errors: list[BaseException] = []
    started = threading.Event()

    def work() -> None:
        try:
            llama(english(12_000), max_tokens=4, progress=lambda done, total: started.set())
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(30)
    llama.close()
    thread.join(30)
    assert not thread.is_alive()


def test_closing_from_inside_a_call_is_refused_and_the_call_goes_on(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, kv_budget=100) as llama:
        refused: list[BaseException] = []

        def close(done: int, total: int) -> None:
            try:
                llama.close()
            except BusyError as error:
                refused.append(error)

        assert llama("abc", max_tokens=2, progress=close)["choices"]
        assert len(refused) == 1 and "inside" in str(refused[0])


def test_twenty_rounds_of_loading_and_closing_do_not_grow(tmp_path: Path) -> None:
    process = psutil.Process()
    sizes = []
    for _ in range(20):
        with open_tiny("llama", tmp_path, kv_budget=180) as llama:
            llama("abcdefgh" * 40, max_tokens=4)
        sizes.append(process.memory_info().rss)
    assert sizes[-1] - sizes[4] < 8 << 20


LEAVE = """
import sys
from h2o_gguf import H2OLlama
llama = H2OLlama(sys.argv[1], kv_budget=128, n_threads=1)
stream = llama("Once upon a time", stream=True, max_tokens=20)
print(next(stream)["choices"][0]["text"] != "")
"""


def test_leaving_the_interpreter_with_an_open_stream_is_quiet(tmp_path: Path) -> None:
    open_llama(kv_budget=128).close()  # skips where there is nothing to run
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, model_path()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,  # not the repository, whose h2o_gguf/ is only a part of the package
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
