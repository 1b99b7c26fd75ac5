"""Where the attic keeps its entries: as other types, within a limit, in a file, on a full disk."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attic_harness import (
    BUDGET,
    N_UBATCH,
    Seen,
    cached,
    check_books,
    history,
    make_room,
    open_attics,
    recall_next,
    recalled,
    rows_of,
    stored,
    total,
    with_attic,
)
from harness import TYPES, Run, random_tokens
from numpy.typing import NDArray
from tiny_models import build

from h2o_gguf.errors import OptionError
from h2o_gguf.policies import ask, make

N_HEADS = 2 * 2  # layers, KV heads
ROW = (64 + 64) * 2  # bytes of a key and a value, f16
CHUNK = 256 * N_HEADS * ROW  # what an attic grows by: 256 entries of each head


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "llama.gguf")


def largest(row: NDArray[np.float32]) -> NDArray[np.float32]:
    """Of each block of 32, for each of its numbers."""
    return np.repeat(np.abs(row.reshape(-1, 32)).max(-1), 32)


# The scale of a block is its largest number over 127, and over -8 (where +8 is cut to 7); the scale and what
# is put back into the cache are rounded to f16.
ROUNDING = {"q8_0": 0.5 / 127 + 2.0**-10, "q4_0": 1 / 8 + 2.0**-10}


@pytest.mark.parametrize("kind", ROUNDING)
def test_what_is_kept_as_another_type_comes_back_within_its_rounding(kind: str, model: Path) -> None:
    with with_attic(model, attic={"type_k": TYPES[kind], "type_v": TYPES[kind]}) as run:
        seen = Seen(run)
        seen.feed(random_tokens(150))
        make_room(run)
        recall_next(run)
        run.decode(random_tokens(8, seed=3))
        check_books(run)
        back, now, n_changed = recalled(run), rows_of(run), 0
        for at in now:
            if at not in seen.rows:
                continue
            for was, is_now in zip(seen.rows[at][1:], now[at][1:], strict=True):
                if at not in back:
                    assert np.array_equal(was, is_now)
                    continue
                assert (np.abs(was - is_now) <= ROUNDING[kind] * largest(was)).all()
                n_changed += not np.array_equal(was, is_now)
        assert n_changed > 0
        exact = 150 * N_HEADS * ROW
        assert total(run, "bytes") < exact or kind == "q8_0"


def test_a_wider_type_loses_nothing(model: Path) -> None:
    """Nor does what went there and back many times."""
    with with_attic(model, attic={"type_k": TYPES["f32"], "type_v": TYPES["f32"]}) as run:
        seen = Seen(run)
        for i in range(12):
            seen.feed(random_tokens(20, seed=i))
            make_room(run)
            recall_next(run)
            seen.feed(random_tokens(8, seed=100 + i))
        check_books(run)
        assert not run.cache.n_rebases or len(run.tokens) > 256
        for at, (rope, key, value) in rows_of(run).items():
            if rope == seen.rows[at][0]:
                assert np.array_equal(key, seen.rows[at][1]) and np.array_equal(value, seen.rows[at][2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_bytes": CHUNK - 1}, (str(CHUNK - 1), str(CHUNK))),
        ({"max_bytes": -1}, ("-1", "negative")),
        ({"type_k": 99}, ("99",)),
        ({"type_v": 24}, ("24",)),  # i8 has no conversion from floats
        ({"type_k": TYPES["q4_0"] + 8}, ()),  # q2_k: blocks of 256, and heads have 64
        ({"folder": Path("/nowhere/at/all")}, ("/nowhere/at/all", "No such file")),
        ({"folder": Path("/dev/null")}, ("/dev/null", "Not a directory")),
        ({"folder": Path("/proc")}, ("/proc",)),  # where nobody can make files, root included
    ],
)
def test_what_cannot_be_kept_is_refused_and_what_was_kept_stays(
    options: dict[str, Any], words: tuple[str, ...], model: Path
) -> None:
    with with_attic(model) as run:
        history(run)
        before = stored(run)
        with pytest.raises(OptionError) as caught:
            run.cache.attic.open(**{"max_bytes": 1 << 24, **options})
        assert all(word in str(caught.value) for word in words), caught.value
        assert stored(run) == before
        recall_next(run)
        run.decode(random_tokens(8, seed=3))
        check_books(run)


def test_nothing_is_kept_unless_it_is_opened_or_once_it_is_closed(model: Path) -> None:
    with with_attic(model, attic={"max_bytes": 0}) as run:
        history(run)
        info = run.cache.attic.info()
        assert (info.n_entry, info.bytes, info.max_bytes, info.n_dropped) == (0, 0, 0, 0)
        with pytest.raises(OptionError, match="nothing can be recalled"):
            recall_next(run)
        open_attics(run)
        run.feed(random_tokens(64, seed=1), N_UBATCH)
        assert total(run, "n_entry") > 0
        open_attics(run, max_bytes=0)
        assert (total(run, "n_entry"), total(run, "bytes")) == (0, 0)


class Scored:
    """What every victim had been attended to when it was named."""

    def __init__(self, run: Run) -> None:
        self.of: dict[tuple[int, int, int, int], float] = {}
        policy = make("h2o+", BUDGET, n_recent=16)

        def victims(view: Any, n: int) -> Any:
            from harness import view_of

            chosen = ask(policy, view_of(view), n)
            for (layer, head, _), cell in np.ndenumerate(chosen):
                at = 0, layer, head, int(view.pos[layer, head, cell])
                self.of[at] = float(view.scores[layer, head, cell])
            return chosen

        run.cache.set_policy(victims)


@pytest.mark.parametrize("n_chunk", [1, 2, 3])
def test_beyond_the_limit_the_least_scored_are_dropped_and_counted(n_chunk: int, model: Path) -> None:
    limit = n_chunk * CHUNK + CHUNK // 2  # half a chunk is none
    with with_attic(model, attic={"max_bytes": limit}) as run:
        scored = Scored(run)
        n_drops, n_dropped, ever = 0, 0, set()
        before = stored(run)
        for i in range(80):
            run.decode(random_tokens(16, seed=i))
            after = stored(run)
            ever |= after
            dropped, stayed = before - after, before & after
            if dropped:
                n_drops += 1
                for layer, head in np.ndindex(2, 2):
                    least = [scored.of[at] for at in dropped if at[1:3] == (layer, head)]
                    rest = [scored.of[at] for at in stayed if at[1:3] == (layer, head)]
                    assert rest, "not all of them go for want of a little space"
                    assert max(least) <= min(rest)
            n_dropped += len(dropped)
            before = after
            assert total(run, "bytes") <= limit
            assert total(run, "n_entry") <= 256 * n_chunk
            assert total(run, "n_dropped") == n_dropped == len(ever) - len(after)
        assert n_drops > 0
        assert len(cached(run)) + len(after) + n_dropped == N_HEADS * len(run.tokens)


def test_an_attic_in_a_file_is_one_in_memory_and_nobody_sees_the_file(model: Path, tmp_path: Path) -> None:
    found = []
    for folder in (None, tmp_path):
        with with_attic(model, attic={"folder": folder}) as run:
            run.feed(random_tokens(400), N_UBATCH)
            recall_next(run)
            logits = run.feed(random_tokens(16, seed=1), 8)
            assert list(tmp_path.iterdir()) == []
            found.append((logits.tobytes(), stored(run), total(run, "bytes"), total(run, "n_recalled")))
    assert found[0] == found[1]


@contextmanager
def no_file_beyond(n_bytes: int) -> Iterator[None]:
    """A disk that is full from there on."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("n_chunk", [0, 1, 2])
def test_a_full_disk_is_a_limit(n_chunk: int, model: Path, tmp_path: Path) -> None:
    with no_file_beyond(n_chunk * CHUNK + CHUNK // 2), with_attic(model, attic={"folder": tmp_path}) as run:
        for i in range(30):
            run.decode(random_tokens(N_UBATCH, seed=i))
            recall_next(run)
        assert np.isfinite(run.decode(random_tokens(8, seed=99))).all()
        held = len(cached(run)) + len(stored(run))
        assert total(run, "bytes") == n_chunk * CHUNK
        assert held + total(run, "n_dropped") == N_HEADS * len(run.tokens)
        assert (total(run, "n_recalled") > 0) == (n_chunk > 0)
        assert not cached(run) & stored(run)


def test_a_sequence_that_is_emptied_gives_its_space_to_others(model: Path, tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        with with_attic(model, n_seq=2, attic={"max_bytes": CHUNK, "folder": folder}) as run:
            run.feed(random_tokens(150), N_UBATCH)
            run.speak_of(1, [])
            run.feed(random_tokens(150), N_UBATCH)
            assert (
                total(run, "n_entry") == 0 and total(run, "n_dropped") == (150 - run.cache.used()) * N_HEADS
            )
            run.speak_of(0, run.tokens)
            assert run.remove(0) and total(run, "bytes") == 0
            run.speak_of(1, run.tokens)
            run.feed(random_tokens(64, seed=1), N_UBATCH)
            assert total(run, "n_entry") > 0


@pytest.mark.parametrize("in_file", [False, True])
def test_sequences_that_need_room_come_to_have_about_as_much(
    in_file: bool, model: Path, tmp_path: Path
) -> None:
    """The first fills all four chunks; chunks are of 256 entries a head."""
    limit = 4 * CHUNK
    with with_attic(
        model, n_seq=3, attic={"max_bytes": limit, "folder": tmp_path if in_file else None}
    ) as run:
        spoken: list[list[int]] = []

        def held() -> list[int]:
            found = []
            for seq, tokens in enumerate(spoken):
                run.speak_of(seq, tokens)
                assert not cached(run) & stored(run)
                info = run.cache.attic.info()
                assert info.n_entry * N_HEADS == len(stored(run)) and info.bytes == limit
                assert N_HEADS * (len(tokens) - run.cache.used() - info.n_entry) == info.n_dropped
                found.append(info.n_entry)
            return found

        for seq, shares in enumerate(([(769, 1024)], [(257, 512)] * 2, [(257, 512), (1, 256), (1, 256)])):
            run.speak_of(seq, [])
            run.feed(random_tokens(1300, seed=seq), N_UBATCH)
            spoken.append(run.tokens)
            now = held()
            got = sorted(now, reverse=True)
            assert all(low <= n <= high for n, (low, high) in zip(got, shares, strict=True)), now
        run.speak_of(0, spoken[0])
        recall_next(run)
        run.decode(random_tokens(8, seed=9))
        assert total(run, "n_recalled") > 0 and not cached(run) & stored(run)


def test_open_files_end_with_the_context(model: Path, tmp_path: Path) -> None:
    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = n_open()
    for _ in range(3):
        with with_attic(model, attic={"folder": tmp_path}) as run:
            history(run)
            open_attics(run, folder=tmp_path)
            assert n_open() > before
    assert n_open() == before
