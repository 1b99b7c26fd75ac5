"""With logits_all, `scores` has a true row for every token that was evaluated, and NaN for the others."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import random_tokens
from llama_harness import open_tiny
from session_harness import unchanged

from h2o_gguf.errors import OptionError

TOKENS = random_tokens(100)


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[Any]:
    with open_tiny("llama", tmp_path, kv_budget=48, n_batch=16, logits_all=True) as llm:
        yield llm


@pytest.fixture
def another(tmp_path: Path) -> Iterator[Any]:
    """Of the same model, in the middle of something else."""
    (tmp_path / "other").mkdir()
    with open_tiny("llama", tmp_path / "other", kv_budget=48, n_batch=16, logits_all=True) as llm:
        llm.eval(random_tokens(150, seed=7))
        yield llm


def test_the_rows_of_a_session_come_with_it(llama: Any, another: Any) -> None:
    llama.eval(TOKENS)
    rows = llama.scores.copy()
    assert rows.shape == (100, llama.n_vocab()) and np.isfinite(rows).all()
    another.load_state(pickle.loads(pickle.dumps(llama.save_state())))
    assert np.array_equal(another.scores, rows) and np.array_equal(another._scores, rows)
    assert np.array_equal(np.array(another.eval_logits, np.single), rows)
    assert another.sample(temp=0.0, idx=40) == int(rows[40].argmax())
    for each in (llama, another):
        each.eval([7, 8])
    assert np.array_equal(another.scores, llama.scores) and len(llama.scores) == 102


def test_rows_that_are_not_known_are_no_numbers(llama: Any, another: Any) -> None:
    llama.eval(TOKENS)
    last = llama.scores[-1].copy()
    another.load_state(llama.save_state().llama_state)
    assert another.scores.shape == (100, llama.n_vocab())
    assert np.isnan(another.scores[:-1]).all() and np.array_equal(another.scores[-1], last)
    assert another.sample(temp=0.0) == another.sample(temp=0.0, idx=99) == int(last.argmax())
    with pytest.raises(OptionError, match="position 98 are not known"):
        another.sample(temp=0.0, idx=98)
    another.eval([7, 8])
    llama.eval([7, 8])
    assert np.isnan(another.scores[:99]).all() and np.array_equal(another.scores[99:], llama.scores[99:])
    another.reset()
    another.eval(TOKENS)
    assert np.isfinite(another.scores).all()


def test_a_session_saved_without_logits_all_has_the_last_row(llama: Any, tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    with open_tiny("llama", tmp_path / "plain", kv_budget=48, n_batch=16) as plain:
        plain.eval(TOKENS)
        state = plain.save_state()
        assert state.scores.shape == (1, plain.n_vocab())
        llama.load_state(state)
        assert np.isnan(llama.scores[:-1]).all() and np.array_equal(llama.scores[-1:], state.scores)
        plain.load_state(state)
        assert np.array_equal(plain.scores, state.scores)


def test_rows_of_tokens_that_others_evaluated_are_no_numbers(llama: Any) -> None:
    llama.eval(TOKENS[:40])
    llama.n_tokens = 20
    known = llama.scores.copy()
    assert llama.engine.context.decode(TOKENS[20:30], 20) == 0  # as image handlers do it
    llama.n_tokens = 30
    assert np.array_equal(llama.scores[:20], known) and np.isnan(llama.scores[20:]).all()


def test_no_row_knows_what_a_later_token_asked_for(tmp_path: Path) -> None:
    """So a text that is scored recalls nothing for itself, though there is an attic."""
    options = {"kv_budget": 48, "n_batch": 64, "logits_all": True, "attic": "ram"}
    with open_tiny("llama", tmp_path, **options) as llm:
        rows = []
        for seed in (1, 2):
            llm.reset()
            llm.eval([*random_tokens(200), *random_tokens(20)])
            llm.eval([*TOKENS[:32], *random_tokens(32, seed)])
            rows.append(llm.scores[:252].copy())
        np.testing.assert_array_equal(*rows)
        assert llm.kv_report().attic.entries > 100 and llm.kv_report().attic.recalled == 0


def test_what_cannot_be_read_again_is_not_forgotten(llama: Any) -> None:
    """Parts of an image, where forgetting the newest tokens would not be exact."""
    llama.eval(TOKENS[:4])
    assert llama.engine.context.decode(TOKENS[4:6], 4) == 0
    llama.n_tokens = 6
    llama.eval(TOKENS)
    with unchanged(llama), pytest.raises(OptionError, match="-1"):
        llama.n_tokens = 8
