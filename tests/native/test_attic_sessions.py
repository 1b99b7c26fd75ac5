"""An attic is saved, restored, copied and emptied with its sequence; bytes that are damaged are refused."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attic_harness import (
    N_UBATCH,
    cached,
    check_books,
    history,
    recall_next,
    rows_of,
    stored,
    total,
    with_attic,
)
from harness import TYPES, Run, random_tokens
from tiny_models import build

from h2o_gguf.errors import PolicyError, StateFileError

OFF: dict[str, Any] = {"max_bytes": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "llama.gguf")


def saved(run: Run) -> tuple[Any, bytes]:
    """llama.cpp's state and ours."""
    size = run.lib.llama_state_get_size(run.ctx)
    state = (ctypes.c_uint8 * size)()
    assert run.lib.llama_state_get_data(run.ctx, state, size) == size
    return state, run.cache.save()


def restore_theirs(run: Run, state: Any, n_past: int) -> None:
    assert run.lib.llama_state_set_data(run.ctx, state, len(state)) == len(state)
    run.tokens = [0] * n_past


def turn(run: Run) -> Any:
    """Logits of a turn that recalls and of what follows."""
    recall_next(run)
    return np.concatenate([run.decode(random_tokens(8, seed=3)), run.feed(random_tokens(20, seed=4), 5)])


@pytest.mark.parametrize("arch", ["llama", "gpt2", "deepseek2", "jamba"])
def test_a_restored_attic_is_recalled_from_as_if_never_saved(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf")
    with with_attic(path) as run:
        history(run)
        recall_next(run)
        run.decode(random_tokens(8, seed=2))
        kept = saved(run)
        before, there, numbers = cached(run), stored(run), run.cache.attic.info()
        lowest = run.cache.rollback_min()
        expected = turn(run)
        after = stored(run)
    with with_attic(path) as run:
        run.feed(random_tokens(90, seed=9), N_UBATCH)
        restore_theirs(run, kept[0], 158)
        assert total(run, "n_entry") == 0, "what another sequence left there is gone with it"
        run.cache.load(kept[1])
        check_books(run)
        assert (cached(run), stored(run), run.cache.attic.info()) == (before, there, numbers)
        assert run.cache.rollback_min() == lowest
        assert np.array_equal(turn(run), expected)
        assert stored(run) == after


def test_sessions_with_and_without_attics_load_each_other(model: Path) -> None:
    with with_attic(model) as run:
        history(run)
        recall_next(run)
        run.decode(random_tokens(8, seed=2))
        with_one = saved(run)
        lowest, held = run.cache.rollback_min(), cached(run)
    with with_attic(model, attic=OFF) as run:
        history(run)
        without, plain = saved(run), cached(run)
        restore_theirs(run, with_one[0], 158)
        run.cache.load(with_one[1])
        assert cached(run) == held and run.cache.rollback_min() == lowest
        assert total(run, "n_entry") == 0
        assert np.isfinite(run.feed(random_tokens(60, seed=3), 20)).all()
    with with_attic(model) as run:
        history(run, 120)
        assert total(run, "n_entry") > 0
        restore_theirs(run, without[0], 150)
        run.cache.load(without[1])
        assert cached(run) == plain and not stored(run)
        run.feed(random_tokens(60, seed=3), 20)
        assert len(cached(run)) + len(stored(run)) < 4 * len(run.tokens)
        assert not cached(run) & stored(run)


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_a_saved_attic_is_converted_to_the_type_of_the_one_it_is_loaded_into(kind: str, model: Path) -> None:
    with with_attic(model) as run:
        history(run)
        kept, there = saved(run), stored(run)
        expected = turn(run)
    with with_attic(model, attic={"type_k": TYPES[kind], "type_v": TYPES[kind]}) as run:
        run.decode([1])
        restore_theirs(run, kept[0], 150)
        run.cache.load(kept[1])
        assert stored(run) == there
        got = turn(run)
        assert np.isfinite(got).all() and np.array_equal(got, expected) == (kind == "f32")


def test_a_saved_attic_that_is_larger_than_the_limit_is_cut_and_counted(model: Path) -> None:
    with with_attic(model) as run:
        run.feed(random_tokens(700), N_UBATCH)
        kept, there = saved(run), stored(run)
    with with_attic(model, attic={"max_bytes": 256 * 4 * 256}) as run:
        run.decode([1])
        restore_theirs(run, kept[0], 700)
        run.cache.load(kept[1])
        assert stored(run) <= there and 0 < total(run, "n_entry") <= 256
        assert total(run, "n_dropped") == len(there) - len(stored(run))
        assert np.isfinite(turn(run)).all()


def test_clearing_or_replacing_a_sequence_empties_its_attic(model: Path) -> None:
    with with_attic(model) as run:
        history(run)
        assert run.remove(0)
        assert (stored(run), total(run, "bytes"), total(run, "n_recalled")) == (set(), 0, 0)
        history(run)
        check_books(run)
        run.lib.llama_memory_clear(run.memory, True)
        run.tokens.clear()
        assert (stored(run), total(run, "bytes")) == (set(), 0)
        history(run)
        check_books(run)


def test_a_copied_sequence_has_a_copy_of_the_attic(model: Path) -> None:
    with with_attic(model, n_seq=3) as run:
        run.speak_of(2, [])
        history(run, 100)
        run.speak_of(0, [])
        history(run)
        run.lib.llama_memory_seq_cp(run.memory, 0, 2, -1, -1)
        tokens, there, rows = run.tokens, stored(run), rows_of(run)
        run.speak_of(2, tokens)
        check_books(run)
        assert stored(run) == there
        copied = rows_of(run)
        assert all(np.array_equal(copied[at][1], row[1]) for at, row in rows.items())
        expected = turn(run)
        run.speak_of(0, tokens[:150])
        check_books(run)
        assert stored(run) == there, "what the copy recalls, it recalls from its own"
        assert np.array_equal(turn(run), expected)


@pytest.fixture(scope="module")
def small(model: Path) -> tuple[Any, bytes]:
    """A session of a few entries, about a third of them evicted."""
    with with_attic(model, budget=24) as run:
        run.feed(random_tokens(40), 8)
        run.cache.make_room(20)
        return saved(run)


def test_every_truncation_is_refused_and_changes_nothing(model: Path, small: tuple[Any, bytes]) -> None:
    state, ours = small
    with with_attic(model, budget=24) as run:
        run.decode([1])
        restore_theirs(run, state, 40)
        run.cache.load(ours)
        here, there = cached(run), stored(run)
        for n in range(len(ours)):
            with pytest.raises(StateFileError):
                run.cache.load(ours[:n])
        with pytest.raises(StateFileError):
            run.cache.load(ours + b"\0")
        assert (cached(run), stored(run)) == (here, there)
        assert np.isfinite(turn(run)).all()


def damaged(ours: bytes, seed: int) -> bytes:
    """A byte of the session flipped; of every second seed, one in front of the rows."""
    rng = np.random.default_rng(seed)
    data = bytearray(ours)
    at = rng.integers(len(data) if seed % 2 else 2000)
    data[at] ^= 1 << rng.integers(8)
    return bytes(data)


def lives_with(model: Path, state: Any, sessions: list[bytes]) -> int:
    """How many of them are refused; with the others the sequence goes on: recalls, evicts and renumbers."""
    n_refused = 0
    with with_attic(model, budget=24) as run:
        run.decode([1])
        for session in sessions:
            restore_theirs(run, state, 40)
            try:
                run.cache.load(session)
            except StateFileError:
                n_refused += 1
                continue
            with contextlib.suppress(PolicyError):  # which finds scores that are no number
                recall_next(run)
                run.decode(random_tokens(4, seed=3))
                run.cache.make_room(20)
                run.cache.rebase()
                stored(run)
    return n_refused


def in_a_child(work: Callable[[], int]) -> int:
    """What work returns in a process of its own, so that its death is a failure of one test."""
    there = multiprocessing.get_context("fork")
    answers = there.SimpleQueue()
    process = there.Process(target=lambda: answers.put(work()))
    process.start()
    process.join()
    assert process.exitcode == 0, f"ended with {process.exitcode}"
    return int(answers.get())


def test_a_flipped_bit_is_refused_or_can_be_lived_with(model: Path, small: tuple[Any, bytes]) -> None:
    state, ours = small
    sessions = [damaged(ours, seed) for seed in range(200)]
    assert 0 < in_a_child(lambda: lives_with(model, state, sessions)) < 200


N_ENTRY, N_HEADS = 20, 2 * 2
HEADER, ENTRY = 80, 12  # bytes; an entry: position, rotary position, score


@pytest.mark.parametrize(
    ("at", "kind", "value"),
    [(0, "<i", 1 << 28), (0, "<i", 40), (0, "<i", -2), (4, "<i", -1), (8, "<f", np.nan)],
)
@pytest.mark.parametrize("where", ["cache", "attic"])
def test_entries_that_cannot_be_are_refused(
    where: str, at: int, kind: str, value: float, model: Path, small: tuple[Any, bytes]
) -> None:
    """A position outside the sequence of 40, a rotary one below 0, a score that is no number."""
    state, ours = small
    n_rows = N_ENTRY * (ENTRY + 2 * 64 * 2)  # of a head in the attic
    first = HEADER + 4 * N_ENTRY if where == "cache" else len(ours) - N_HEADS * n_rows
    assert struct.unpack_from("<i", ours, first)[0] in range(40), "the layout is what this test thinks"
    session = bytearray(ours)
    struct.pack_into(kind, session, first + at, value)
    assert in_a_child(lambda: lives_with(model, state, [bytes(session)])) == 1
