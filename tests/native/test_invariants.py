"""The invariants of the design under random histories, with every registered policy.

I1 occupied cells are the same for every layer and head. I2 llama.cpp's books hold the last `used` positions.
I3 the newest n_recent positions are held by every head and rolling back into them is exact. I4 (rows move bit
for bit) is tested natively. I5 with a budget never reached, logits are those of the same kernel without
eviction.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import Run, opened, policy_of, random_tokens
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import build

from h2o_gguf.policies import make, names

BUDGET, BLOCK, N_UBATCH, N_RECENT = 48, 8, 32, 16
EVICTING = [name for name in names() if name != "none"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "llama.gguf", n_ctx_train=128)


def check(run: Run, n_recent: int, n_sink: int) -> None:
    cache, lib = run.cache, run.lib
    view = cache.view()
    occupied = view.pos >= 0
    assert (occupied == occupied[0, 0]).all(), "I1"
    oldest, newest = (f(run.memory, 0) for f in (lib.llama_memory_seq_pos_min, lib.llama_memory_seq_pos_max))
    assert view.n_past == newest + 1 == len(run.tokens)
    assert view.n_used == (newest - oldest + 1 if newest >= 0 else 0), "I2"
    assert view.n_used == occupied[0, 0].sum()
    for positions in view.pos.reshape(-1, view.pos.shape[-1]):
        held = positions[positions >= 0]
        assert len(set(held.tolist())) == len(held), "no position twice"
        recent = range(max(0, view.n_past - n_recent), view.n_past)
        assert set(recent) <= set(held.tolist()), "I3"
        assert set(range(min(n_sink, view.n_past))) <= set(held.tolist()), "sinks"
    assert cache.rollback_min() <= max(0, view.n_past - n_recent), "I3"
    assert (view.scores[~occupied] == 0).all() and (view.scores >= 0).all()
    order = np.argsort(np.where(occupied, view.pos, -1), -1, kind="stable")
    rope = np.take_along_axis(view.rope_pos, order, -1)
    assert (np.diff(rope, axis=-1)[..., -max(view.n_used - 1, 1) :] > 0).all() or view.n_used < 2, (
        "order is kept"
    )
    assert view.rope_pos.max() < 128


step = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, N_UBATCH)),
    st.tuples(st.just("rollback"), st.integers(1, N_RECENT)),
    st.tuples(st.just("room"), st.integers(BUDGET // 2, BUDGET)),
)


@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
@pytest.mark.parametrize("name", EVICTING)
@given(steps=st.lists(step, min_size=3, max_size=25), seed=st.integers(0, 1000))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_invariants_hold_through_any_history(
    model: Path, name: str, granularity: str, steps: list[tuple[str, int]], seed: int
) -> None:
    policy = make(name, BUDGET, n_recent=N_RECENT, granularity=granularity)
    with opened(model, n_ubatch=N_UBATCH, budget=BUDGET, block=BLOCK, decay=policy.decay) as run:
        policy_of(run, policy)
        tokens = iter(random_tokens(2000, seed))
        run.decode([next(tokens) for _ in range(N_UBATCH)])
        # A rollback takes away recent entries, and older ones do not come back for them.
        n_recent = N_RECENT
        for kind, n in steps:
            if kind == "decode":
                run.decode([next(tokens) for _ in range(n)])
                n_recent = min(N_RECENT, n_recent + n)
                assert run.cache.used() <= BUDGET + max(BLOCK, n)
            elif kind == "rollback":
                if run.cache.rollback_min() <= run.cache.n_past() - n:
                    assert run.remove(run.cache.n_past() - n)
                    n_recent = max(0, n_recent - n)
            else:
                run.cache.make_room(n)
            check(run, n_recent, policy.n_sink)


def test_what_would_leave_nothing_of_an_evicted_sequence_is_no_rollback(model: Path) -> None:
    """All that is older is gone, and llama.cpp's books would count from 0 again."""
    with opened(model, n_ubatch=N_UBATCH, budget=BUDGET, block=BLOCK) as run:
        policy_of(run, make("streaming", BUDGET, n_sink=0, n_recent=N_RECENT))
        run.decode(random_tokens(N_UBATCH))
        run.cache.make_room(24)
        oldest = N_UBATCH - 24
        assert run.cache.rollback_min() == oldest + 1
        assert not run.remove(oldest) and not run.remove(1)
        assert (run.cache.n_past(), run.cache.used()) == (N_UBATCH, 24)
        assert run.remove(oldest + 1)
        assert (run.cache.n_past(), run.cache.used()) == (oldest + 1, 1)
        assert run.remove(0)
        assert (run.cache.n_past(), run.cache.used()) == (0, 0)


@pytest.mark.parametrize("name", ["h2o", "h2o+", "streaming"])
def test_rolling_back_and_reading_again_gives_the_same_logits(model: Path, name: str) -> None:
    policy = make(name, BUDGET, n_recent=N_RECENT)
    tokens = random_tokens(200)
    with opened(model, n_ubatch=N_UBATCH, budget=BUDGET, block=BLOCK) as run:
        policy_of(run, policy)
        run.feed(tokens[:180], N_UBATCH)
        run.cache.make_room(BUDGET)
        first = run.feed(tokens[180:188], 1)
        assert run.remove(180), "inside the recent window"
        again = run.feed(tokens[180:188], 1)
        assert np.array_equal(first, again)
        assert not run.remove(run.cache.rollback_min() - 1), "further back is refused"
        assert len(run.tokens) == 188


@pytest.mark.parametrize("is_scored", [True, False])
@pytest.mark.parametrize("attention", ["fused", "composed"])
def test_a_budget_never_reached_changes_no_bit(model: Path, attention: str, is_scored: bool) -> None:
    tokens = random_tokens(100)
    with opened(model, budget=0, attention=attention, is_scored=is_scored) as run:
        expected = np.concatenate([run.feed(tokens[:80], 32), run.feed(tokens[80:], 1)])
    with opened(model, budget=128, block=8, attention=attention, is_scored=is_scored) as run:
        policy_of(run, make("h2o+", 128))
        got = np.concatenate([run.feed(tokens[:80], 32), run.feed(tokens[80:], 1)])
        assert run.cache.n_evicted == 0
    assert np.array_equal(expected, got), "I5"


@pytest.mark.parametrize(("fed", "kept"), [(31, 31), (32, 32), (33, 32), (34, 32)])
def test_borders_of_the_budget_are_exact(model: Path, fed: int, kept: int) -> None:
    """Budget 32 = 4 sinks + 28 recent: beyond 32 tokens, exactly the oldest non-sinks are gone."""
    policy = make("streaming", 32, n_sink=4, n_recent=28)
    with opened(model, n_ubatch=N_UBATCH, budget=32, block=1) as run:
        policy_of(run, policy)
        run.feed(random_tokens(fed), 1)
        run.cache.make_room(32)
        expected = list(range(fed)) if fed <= 32 else [0, 1, 2, 3, *range(fed - 28, fed)]
        assert run.cache.used() == kept
        assert (run.kept() == expected).all()


def test_memory_is_bounded_in_prefill_as_in_decode(model: Path) -> None:
    policy = make("h2o+", BUDGET)
    with opened(model, n_ctx=256, n_ubatch=N_UBATCH, budget=BUDGET, block=BLOCK) as run:
        policy_of(run, policy)
        for _ in range(30):
            run.decode(random_tokens(N_UBATCH))
            assert run.cache.used() <= BUDGET + N_UBATCH
        for token in random_tokens(100):
            run.decode([token])
            assert run.cache.used() <= BUDGET + BLOCK or run.cache.n_past() < 30 * N_UBATCH + 2
        assert run.cache.n_past() == 30 * N_UBATCH + 100


def test_what_a_policy_raises_reaches_the_caller_and_nothing_is_lost(model: Path) -> None:
    with opened(model, n_ubatch=N_UBATCH, budget=BUDGET, block=BLOCK) as run:

        def broken(_view: object, _n: int) -> None:
            raise ZeroDivisionError("in the policy")

        run.cache.set_policy(broken)
        run.feed(random_tokens(64), N_UBATCH)
        with pytest.raises(ZeroDivisionError, match="in the policy"):
            run.decode(random_tokens(32))
        with pytest.raises(ZeroDivisionError, match="in the policy"):
            run.cache.make_room(10)
        assert run.cache.used() == 64 and run.cache.n_past() == 64
        policy_of(run, make("h2o+", BUDGET))
        run.decode(random_tokens(32))


def test_saved_state_goes_on_as_if_never_saved(model: Path) -> None:
    import ctypes

    tokens = random_tokens(300)
    policy = make("h2o+", BUDGET)
    options = {"n_ubatch": N_UBATCH, "budget": BUDGET, "block": BLOCK, "decay": policy.decay}
    with opened(model, **options) as run:
        policy_of(run, policy)
        run.feed(tokens[:200], N_UBATCH)
        size = run.lib.llama_state_get_size(run.ctx)
        state = (ctypes.c_uint8 * size)()
        assert run.lib.llama_state_get_data(run.ctx, state, size) == size
        ours = run.cache.save()
        kept, scores = run.kept(), np.sort(run.cache.scores, -1)
        expected = run.feed(tokens[200:], 10)
    with opened(model, **options) as run:
        policy_of(run, policy)
        run.feed(tokens[50:90], 20)
        assert run.lib.llama_state_set_data(run.ctx, state, size) == size
        run.cache.load(ours)
        run.tokens = tokens[:200]
        assert np.array_equal(run.kept(), kept) and np.array_equal(np.sort(run.cache.scores, -1), scores)
        got = run.feed(tokens[200:], 10)
        assert np.array_equal(got, expected), "cells are put back, so every sum runs in the same order"
        for damaged in (b"", ours[:40], b"x" + ours[1:], ours + b"x"):
            with pytest.raises(ValueError, match="state"):
                run.cache.load(damaged)
