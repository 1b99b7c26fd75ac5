"""Ctrl-C before any line of the engine leaves it able to go on as if the call had never been made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from engine_fakes import FakeAttic, FakeCache, FakeContext, evicting, logits_are_right, take
from interrupting import interrupted

from h2o_gguf.engine import Engine
from h2o_gguf.recalls import Recalls
from h2o_gguf.restoring import restore_session, save_session
from h2o_gguf.taking_back import taken_back

BUDGET, HISTORY, MORE = 40, [1, 2, 3] * 20, [4, 5] * 8


def opened() -> tuple[Engine, FakeContext, FakeCache, FakeAttic]:
    """With a history that was evicted from."""
    e, context, cache = evicting(BUDGET, n_batch=64)
    attic = FakeAttic(context)
    e.recalls = Recalls(attic)  # type: ignore[arg-type]

    def make_room() -> None:
        cache.make_room(BUDGET)

    context.before = make_room
    e.prefill(HISTORY)
    return e, context, cache, attic


def read(e: Engine) -> None:
    e.prefill(MORE, recall=True)


def read_all(e: Engine) -> None:
    e.sync([*HISTORY[:-2], *MORE], pins=[(0, 5)])


def begin_anew(e: Engine) -> None:
    e.sync(MORE, pins=[(1, 3)])


def write(e: Engine) -> None:
    take(e, 4)


def forget(e: Engine) -> None:
    e.rollback(len(HISTORY) - 4)


def recall(e: Engine) -> None:
    e.recall(4)


def load(e: Engine) -> None:
    other, _, _ = evicting(BUDGET, n_batch=64)
    other.prefill(MORE)
    restore_session(e, save_session(other, {}), {})


ACTS = [read, read_all, begin_anew, write, forget, recall, load, Engine.reset]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_after_ctrl_c_anywhere_the_next_prompt_is_read_as_by_a_new_engine(
    act: Callable[[Engine], Any],
) -> None:
    n = 0
    while True:
        n += 1
        e, context, _, attic = opened()
        if not interrupted(n, lambda e=e: act(e)):
            break
        n_asked = len(attic.asked)
        prompt = [*e.tokens, 7, 8]
        e.sync(prompt, recall=False)
        assert e.tokens == context.seen == prompt and e.token_array.tolist() == prompt, n
        assert logits_are_right(e, context), n
        assert len(attic.asked) == n_asked, f"line {n}: a batch recalls that was not to"
        assert take(e, 2) and len(e.tokens) == len(prompt) + 1 and logits_are_right(e, context), n
    assert n > 5


def test_a_message_taken_back_after_ctrl_c_anywhere_leaves_the_history() -> None:
    n = 0
    while True:
        n += 1
        e, context, _, _ = opened()

        def act(e: Engine = e) -> None:
            with taken_back(e, len(MORE)):
                e.prefill(MORE, recall=True)

        if not interrupted(n, act):
            break
        e.sync([*HISTORY, 7], recall=False)
        assert e.tokens == context.seen == [*HISTORY, 7] and logits_are_right(e, context), n
    assert n > 5


def test_a_batch_that_is_never_decoded_arms_none_after_it() -> None:
    e, context, _, attic = opened()
    tokens = e._pins, e.n_past

    def interrupt() -> None:
        raise KeyboardInterrupt

    context.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        e.prefill(MORE, recall=True)
    assert (e._pins, e.n_past) == tokens and not attic.is_armed, "whoever decodes next need not be the engine"
    context.before = lambda: None
    e.prefill(MORE)
    assert attic.asked == []
    assert np.array_equal(e.token_array, [*HISTORY, *MORE])
