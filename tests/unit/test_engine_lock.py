"""One call at a time: threads wait, whoever would wait for ever is told."""

from __future__ import annotations

import threading
import time

import pytest

from h2o_gguf.errors import BusyError, ClosedError
from h2o_gguf.lock import CallLock, Gone


def test_calls_of_two_threads_do_not_overlap() -> None:
    lock = CallLock("it")
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(20):
            with lock.call():
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.0005)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) == 80


def test_a_call_from_inside_a_call_is_refused_at_once() -> None:
    lock = CallLock("it")
    with lock.call(), pytest.raises(BusyError, match="inside"):
        lock.enter()
    with lock.call():
        pass


def test_a_turn_that_its_caller_lost_is_over() -> None:
    """As Ctrl-C loses it, before the caller has it or instead of its end."""
    lock = CallLock("it")
    lock.enter()
    with lock.call():
        pass
    kept = [lock.enter()]
    thread = threading.Thread(target=kept.clear)
    waited = threading.Thread(target=lambda: lock.enter().end())
    waited.start()
    time.sleep(0.05)
    thread.start()
    waited.join(5)
    assert not waited.is_alive()
    lock.refuse_inside("close")


def test_the_only_thread_is_told_at_once_that_it_left_a_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    lock = CallLock("it")
    turn = lock.enter()
    turn.pause()
    with pytest.raises(BusyError, match="open stream"):
        lock.enter()
    turn.end()
    with lock.call():
        pass


def test_a_stream_read_by_a_thread_pool_belongs_to_no_thread() -> None:
    lock = CallLock("it")
    turn = lock.enter()
    turn.pause()  # this thread read a piece; the next one is read by another

    def read_on() -> None:
        time.sleep(0.05)
        turn.resume()
        turn.end()

    thread = threading.Thread(target=read_on)
    thread.start()
    with lock.call():
        pass
    thread.join()


def test_another_thread_waits_for_a_stream_that_is_being_read() -> None:
    lock = CallLock("it", patience_s=0.2)
    turn = lock.enter()
    entered = threading.Event()

    def other() -> None:
        with lock.call():
            entered.set()

    thread = threading.Thread(target=other)
    thread.start()
    for _ in range(5):
        turn.pause()
        time.sleep(0.06)
        turn.resume()
    assert not entered.is_set()
    turn.end()
    thread.join(2)
    assert entered.is_set()


def test_another_thread_does_not_wait_for_ever_for_a_stream_nobody_reads() -> None:
    lock = CallLock("it", patience_s=0.05)
    turn = lock.enter()
    turn.pause()
    errors: list[BaseException] = []

    def other() -> None:
        try:
            lock.enter()
        except BusyError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(2)
    assert len(errors) == 1 and "nobody has read" in str(errors[0])


def test_a_turn_may_end_in_another_thread_and_more_than_once() -> None:
    lock = CallLock("it")
    turn = lock.enter()
    thread = threading.Thread(target=turn.end)
    thread.start()
    thread.join()
    second = lock.enter()
    turn.end()  # the old turn must not free the new one
    with pytest.raises(BusyError):
        lock.enter()
    second.end()
    lock.enter().end()


def test_an_error_inside_a_call_lets_the_next_one_in() -> None:
    lock = CallLock("it")
    with pytest.raises(KeyError), lock.call():
        raise KeyError
    lock.enter().end()


def test_whatever_is_asked_of_something_gone_is_a_closed_error() -> None:
    with pytest.raises(ClosedError, match="the thing"):
        Gone("the thing").model  # noqa: B018
