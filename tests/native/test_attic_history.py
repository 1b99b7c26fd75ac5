"""An attic through the history of its sequence: rollbacks, renumbering, and any of them in any order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from attic_harness import (
    BUDGET,
    N_RECENT,
    N_UBATCH,
    Seen,
    check_books,
    history,
    make_room,
    recall_next,
    recalled,
    rows_of,
    stored,
    with_attic,
)
from harness import ROTATED, WINDOWED, random_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import build


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "llama.gguf")


@pytest.mark.parametrize("arch", ["llama", "gemma3", "deepseek2", "gpt-oss"])
def test_rolling_back_behind_a_recall_is_exact_and_further_is_refused(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf")
    logits = []
    for goes_back in (False, True):
        with with_attic(path) as run:
            history(run)
            recall_next(run)
            run.decode(random_tokens(4, seed=3))
            assert recalled(run)
            n_past, lowest = len(run.tokens), run.cache.rollback_min()
            assert lowest <= n_past - 4 - N_RECENT, "what stayed is where it was"
            if goes_back:
                run.feed(random_tokens(4, seed=4), 1)
                assert not run.remove(lowest - 1) and len(run.tokens) == n_past + 4
                assert run.remove(n_past)
            check_books(run)
            logits.append(run.feed(random_tokens(4, seed=5), 1))
    assert np.array_equal(*logits)


def test_entries_that_a_recall_took_out_cannot_be_rolled_back_over(model: Path) -> None:
    """Nothing protected: the newest entries may be exchanged as well, and then their cells hold others."""
    with with_attic(model, budget=16) as run:
        run.feed(random_tokens(150), N_UBATCH)
        run.cache.make_room(12)
        run.cache.attic.recall_next()
        run.decode(random_tokens(4, seed=3))
        check_books(run)
        lowest, view = run.cache.rollback_min(), run.cache.view()
        for pos in range(lowest, view.n_past):
            assert (
                len({tuple(np.flatnonzero(row == pos)) for row in view.pos.reshape(-1, view.pos.shape[-1])})
                == 1
            )
        assert not run.remove(lowest - 1)
        if lowest < view.n_past:
            assert run.remove(lowest)
            check_books(run)


ROUNDING = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "q8_0": 0.5 / 127, "q4_0": 1 / 8}  # of the largest


@pytest.mark.parametrize(
    ("arch", "kind"), [(a, "f32") for a in (*ROTATED, *WINDOWED)] + [("llama", k) for k in ROUNDING]
)
def test_entries_are_renumbered_in_the_attic_as_in_the_cache(arch: str, kind: str, tmp_path: Path) -> None:
    """The key that comes back is the one that went, turned as far as its rotary position moved."""
    with with_attic(build(arch, tmp_path / "m.gguf", n_ctx_train=128), type_k=kind, type_v=kind) as run:
        seen = Seen(run)
        while run.cache.n_rebases < 3:
            seen.feed(random_tokens(N_UBATCH, seed=len(run.tokens)))
        n_turns = run.cache.n_rebases + 1
        make_room(run)
        recall_next(run)
        run.decode(random_tokens(8, seed=3))
        check_books(run)
        back, now = recalled(run), rows_of(run)
        n_turned = 0
        for at in back:
            rope, key, value = now[at]
            was, old, as_was = seen.rows[at]
            rotation = run.cache.view().observation.rotation(at[1])
            expected = rotation.turned(old, rope - was)
            most = np.abs(old).max() * np.sqrt(2)  # of a pair, however it is turned
            assert np.abs(key - expected).max() <= most * (n_turns * ROUNDING[kind] + 1e-4), at
            assert np.array_equal(value, as_was)
            assert 0 <= rope < 128
            n_turned += int(rope != was)
        assert n_turned > 0


step = st.one_of(
    st.tuples(st.sampled_from(["decode", "recall"]), st.integers(1, N_UBATCH)),
    st.tuples(st.just("rollback"), st.integers(1, N_RECENT)),
    st.tuples(st.just("room"), st.integers(BUDGET // 2, BUDGET)),
    st.tuples(st.just("renumber"), st.just(0)),
)


@pytest.mark.parametrize("name", ["h2o+", "streaming", "random", "keydiff"])
@given(steps=st.lists(step, min_size=5, max_size=30), seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_history_loses_an_entry_or_has_one_twice(
    model: Path, name: str, steps: list[tuple[str, int]], seed: int
) -> None:
    with with_attic(model, name) as run:
        tokens = iter(random_tokens(2000, seed))
        run.decode([next(tokens) for _ in range(N_UBATCH)])
        for kind, n in steps:
            if kind == "recall":
                recall_next(run)
            if kind in ("decode", "recall"):
                run.decode([next(tokens) for _ in range(n)])
            elif kind == "rollback" and run.cache.rollback_min() <= len(run.tokens) - n:
                assert run.remove(len(run.tokens) - n)
            elif kind == "room":
                run.cache.make_room(n)
            elif kind == "renumber":
                run.cache.rebase()
            check_books(run)
            view = run.cache.view()
            occupied = view.pos >= 0
            assert (occupied == occupied[0, 0]).all() and (view.scores[~occupied] == 0).all()
            assert not view.recalled[~occupied].any() and view.rope_pos.max() < 256
            assert all(at[3] < run.cache.rollback_min() for at in stored(run)), (
                "none comes back in a rollback"
            )
