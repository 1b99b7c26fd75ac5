"""Where all layers hold the same positions, a batch asks first, and all of them recall what it asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attic_harness import (
    Seen,
    cached,
    check_books,
    make_room,
    recall_next,
    recalled,
    rows_of,
    stored,
    with_attic,
)
from harness import Run, random_tokens
from tiny_models import build

from h2o_gguf.errors import OptionError

QUESTION = random_tokens(8, seed=3)


def ask(run: Run, **options: Any) -> int:
    """Ask, forget the question, and fetch what it asked for; return its position."""
    n_past = len(run.tokens)
    recall_next(run, alike="token", **options)
    run.decode(QUESTION)
    assert run.remove(n_past)
    for group in run.cache.groups:
        group.attic.recall_asked()
    return n_past


@pytest.mark.parametrize("arch", ["llama", "gemma3", "deepseek2", "qwen2"])
def test_all_layers_recall_the_same_positions_as_they_were(arch: str, tmp_path: Path) -> None:
    with with_attic(build(arch, tmp_path / "m.gguf"), "streaming") as run:
        seen = Seen(run)
        seen.feed(random_tokens(150))
        make_room(run)
        before, there = cached(run), stored(run)
        n_past = ask(run)
        back = recalled(run)
        assert back and back <= there and back == cached(run) - before
        run.decode(QUESTION)
        check_books(run)
        assert recalled(run) == back
        for group in run.cache.groups:
            assert (group.pos == group.pos[:1, :1]).all()
        for at, (rope, key, value) in rows_of(run).items():
            if at[3] < n_past:
                assert rope == seen.rows[at][0]
                assert np.array_equal(key, seen.rows[at][1]) and np.array_equal(value, seen.rows[at][2]), at


def test_what_was_asked_for_last_is_what_is_spared(tmp_path: Path) -> None:
    with with_attic(build("llama", tmp_path / "m.gguf"), "streaming") as run:
        run.feed(random_tokens(150), 32)
        make_room(run)
        for n_most in (3, 1):
            before = cached(run)
            ask(run, n_most=n_most)
            assert recalled(run) and recalled(run) == cached(run) - before
        run.decode(QUESTION)
        assert recalled(run) == cached(run) - before - {at for at in cached(run) if at[3] >= 150}


def test_asking_leaves_no_trace(tmp_path: Path) -> None:
    """With nothing to exchange, scores, observers and logits are those of a question that was read once."""
    found = []
    for asks in (True, False):
        with with_attic(build("llama", tmp_path / "m.gguf"), "h2o") as run:
            run.feed(random_tokens(150), 32)
            make_room(run)
            told: list[int] = []
            run.cache.set_observer(lambda _view, n, told=told: told.append(n))
            if asks:
                ask(run, n_most=0)
            logits = run.decode(QUESTION)
            view = run.cache.view()
            order = np.argsort(view.pos, axis=-1)
            scores = np.take_along_axis(view.scores, order, -1)
            found.append((logits, np.sort(view.pos, axis=-1), scores.copy(), told))
    for with_asking, without in zip(*found, strict=True):
        np.testing.assert_array_equal(with_asking, without)


def test_what_nobody_asked_for_is_refused(tmp_path: Path) -> None:
    with with_attic(build("llama", tmp_path / "m.gguf")) as run:
        run.feed(random_tokens(100), 32)
        with pytest.raises(OptionError, match="asked for nothing"):
            run.cache.attic.recall_asked()
        make_room(run)
        recall_next(run)
        run.decode(QUESTION)
        with pytest.raises(OptionError, match="asked for nothing"):
            run.cache.attic.recall_asked()


def test_what_was_asked_for_fits_however_the_sequence_went_on(tmp_path: Path) -> None:
    """Emptied, longer or shorter than it was: what is exchanged is there."""
    with with_attic(build("llama", tmp_path / "m.gguf"), "streaming") as run:
        run.feed(random_tokens(150), 32)
        make_room(run)
        recall_next(run, alike="token")
        run.decode(QUESTION)
        run.cache.attic.recall_asked()  # and was not rolled back
        check_books(run)
        run.cache.attic.recall_asked()  # nothing is left to exchange
        check_books(run)
        recall_next(run, alike="token")
        run.decode(QUESTION)
        assert run.remove(0)
        run.cache.attic.recall_asked()
        assert not cached(run) and not stored(run)
