"""What was read in part is taken back, by a copy where that is worth it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from engine_fakes import FakeAttic, FakeCache, FakeContext, evicting

from h2o_gguf import taking_back
from h2o_gguf.engine import Engine
from h2o_gguf.recalls import Recalls
from h2o_gguf.restoring import SequenceCopy
from h2o_gguf.taking_back import COPIED_BYTES, N_UNCOPIED, SHARE, taken_back

HISTORY, BUDGET = [1, 2, 3] * 20, 40
MESSAGE = [4] * (N_UNCOPIED + 50)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SequenceCopy]]:
    made: list[SequenceCopy] = []

    def note(engine: Engine) -> SequenceCopy:
        made.append(SequenceCopy(engine))
        return made[-1]

    monkeypatch.setattr(taking_back, "SequenceCopy", note)
    monkeypatch.setattr(taking_back, "available_bytes", lambda: None)
    yield made


def with_history(budget: int = BUDGET) -> tuple[Engine, FakeContext, FakeCache, FakeAttic]:
    e, context, cache = evicting(budget, n_batch=64)
    attic = FakeAttic(context)
    e.recalls = Recalls(attic)  # type: ignore[arg-type]

    def make_room() -> None:
        cache.make_room(budget)

    context.before = make_room
    e.prefill(HISTORY)
    return e, context, cache, attic


def interrupted(e: Engine, tokens: list[int], n_read: int) -> None:
    """Ctrl-C after n_read of the tokens."""
    with suppress(KeyboardInterrupt), taken_back(e, len(tokens)):
        e.prefill(tokens[:n_read])
        raise KeyboardInterrupt


def test_what_was_evicted_meanwhile_comes_back_though_positions_could_be_rolled_back(
    copies: list[SequenceCopy],
) -> None:
    e, context, cache, _ = with_history()
    n_evicted = cache.n_evicted
    cache.rollback_min = lambda: 0  # type: ignore[method-assign]
    interrupted(e, MESSAGE, 64)
    assert e.tokens == context.seen == HISTORY
    assert len(copies) == 1 and cache.n_evicted == n_evicted > 0


def test_a_copy_is_put_back_where_a_rollback_is_not_exact(copies: list[SequenceCopy]) -> None:
    e, context, cache, _ = with_history()
    n_evicted = cache.n_evicted
    interrupted(e, MESSAGE, 200)
    assert len(copies) == 1
    assert e.tokens == context.seen == HISTORY and cache.n_evicted == n_evicted > 0


def test_what_is_read_to_its_end_stays(copies: list[SequenceCopy]) -> None:
    e, context, _, _ = with_history()
    with taken_back(e, len(MESSAGE)):
        e.prefill(MESSAGE)
    assert e.tokens == context.seen == HISTORY + MESSAGE


def test_nothing_is_copied_where_a_rollback_will_be_exact(copies: list[SequenceCopy]) -> None:
    n_total = len(HISTORY) + len(MESSAGE)
    e, context, _, _ = with_history(n_total)
    interrupted(e, MESSAGE, len(MESSAGE))
    assert copies == [] and e.tokens == context.seen == HISTORY
    e, _, _, _ = with_history(n_total - 1)
    interrupted(e, MESSAGE, 1)
    assert len(copies) == 1
    e, context, _, _ = with_history(n_total)
    context.n_swa = 512  # rows of a sliding window are gone however large the budget
    interrupted(e, MESSAGE, 1)
    assert len(copies) == 2
    e, _, _, _ = with_history()
    interrupted(e, MESSAGE[:N_UNCOPIED], 5)
    assert len(copies) == 2 and e.tokens == HISTORY, "inside the recent window"


@pytest.mark.parametrize("is_more", [False, True])
def test_a_copy_is_small_for_what_is_read(is_more: bool, copies: list[SequenceCopy]) -> None:
    e, _, _, attic = with_history()
    attic.n_bytes = len(MESSAGE) * COPIED_BYTES - e.report().used_bytes + is_more
    interrupted(e, MESSAGE, 200)
    assert len(copies) == (not is_more)
    assert e.tokens == (HISTORY + MESSAGE[:200] if is_more else HISTORY), "all is read again"


@pytest.mark.parametrize("is_more", [False, True])
def test_a_copy_is_small_for_the_memory(
    is_more: bool, copies: list[SequenceCopy], monkeypatch: pytest.MonkeyPatch
) -> None:
    e, _, _, attic = with_history()
    attic.n_bytes = 1000
    n_bytes = SHARE * (e.report().used_bytes + attic.n_bytes)
    monkeypatch.setattr(taking_back, "available_bytes", lambda: n_bytes - is_more)
    interrupted(e, MESSAGE, 200)
    assert len(copies) == (not is_more)


def test_the_error_is_told_even_where_the_copy_cannot_be_put_back(copies: list[SequenceCopy]) -> None:
    e, context, _, _ = with_history()
    context.load = lambda data: False  # type: ignore[method-assign]
    with pytest.raises(KeyError, match="mine"), taken_back(e, len(MESSAGE)):
        e.prefill(MESSAGE)
        raise KeyError("mine")
    assert e.tokens == context.seen == [], "and all is read again"
