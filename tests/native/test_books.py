"""What programs that know only llama.cpp's API do to the books: all of it is followed, or refused whole."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from harness import Run, opened, policy_of, random_tokens
from tiny_models import build

from h2o_gguf.policies import make

OPTIONS = {"n_ctx": 512, "n_ubatch": 32, "budget": 64, "block": 8}


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt-oss", "jamba"])
def test_a_refused_removal_changes_nothing(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf")
    with opened(path, **OPTIONS) as run:
        policy_of(run, make("h2o+", 64))
        run.feed(random_tokens(150), 25)
        before = run.cache.pos.copy()
        lowest = run.cache.rollback_min()
        assert lowest > 0
        oldest = 150 - run.cache.used()  # in the books of the evicted layers
        for p0, p1 in ((lowest - 1, -1), (oldest, oldest + 3), (0, oldest + 1)):
            assert not run.remove(p0, p1)
            assert run.lib.llama_memory_seq_pos_max(run.memory, 0) == 149
            assert np.array_equal(run.cache.pos, before)
        assert np.isfinite(run.decode(random_tokens(10))).all()


def test_clearing_and_restoring_start_new_books(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf", n_ctx_train=128)
    tokens = random_tokens(400)
    with opened(path, **OPTIONS) as run:
        policy_of(run, make("h2o+", 64))
        run.feed(tokens[:40], 20)
        size = run.lib.llama_state_get_size(run.ctx)
        state = (ctypes.c_uint8 * size)()
        assert run.lib.llama_state_get_data(run.ctx, state, size) == size
        expected = run.decode(tokens[40:50])
        run.feed(tokens[50:], 25)
        assert run.cache.n_rebases > 0
        assert run.lib.llama_state_set_data(run.ctx, state, size) == size
        assert (run.cache.n_evicted, run.cache.n_rebases, run.cache.rollback_min()) == (0, 0, 0)
        assert np.array_equal(np.sort(run.cache.rope_pos[0, 0])[-40:], np.arange(40))
        assert np.array_equal(run.decode(tokens[40:50]), expected)
        run.lib.llama_memory_clear(run.memory, True)
        assert run.cache.used() == 0 and not run.cache.scores.any()
        assert np.array_equal(run.feed(tokens[:40], 20)[-1], _fresh(path, tokens[:40])[-1])


def _fresh(path: Path, tokens: list[int]) -> np.ndarray:
    with opened(path, **OPTIONS) as run:
        return run.feed(tokens, 20)


def test_entries_at_one_position_are_evicted_one_by_one(tmp_path: Path) -> None:
    """An image gives many entries the same position."""
    path = build("qwen2vl", tmp_path / "m.gguf")
    with opened(path, **OPTIONS) as run:
        policy_of(run, make("random", 64))
        decode_at(run, [*range(10)])
        decode_at(run, [10] * 30)
        decode_at(run, [*range(11, 31)])
        assert run.cache.used() == 60
        assert run.cache.make_room(48) == 12
        assert run.cache.used() == 48
        assert ((run.cache.pos >= 0).sum(-1) == 48).all()


def decode_at(run: Run, positions: list[int]) -> None:
    batch = run.lib.llama_batch_init(len(positions), 0, 1)
    batch.n_tokens = len(positions)
    for i, pos in enumerate(positions):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = 7, pos, 1, 0
        batch.seq_id[i][0] = 0
    assert run.lib.llama_decode(run.ctx, batch) == 0
    run.lib.llama_batch_free(batch)


def test_learned_positions_bound_any_wish(tmp_path: Path) -> None:
    path = build("gpt2", tmp_path / "m.gguf", n_ctx_train=64)
    with opened(path, n_ctx=256, n_ubatch=16, budget=32, block=8, n_pos_max=1000) as run:
        policy_of(run, make("streaming", 32))
        assert run.cache.info.n_pos_max == 64
        run.feed(random_tokens(64), 16)
        code, _ = run.try_decode(random_tokens(1))
        assert code == -100
