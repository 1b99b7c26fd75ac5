"""Traces follow their entries: a random walk beside a dictionary."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_gguf.saved_traces import pack, unpack
from h2o_gguf.traces import Traces

N_TRACE, N_LAYER, N_HEAD_KV, N_CELLS = 2, 2, 2, 12

STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 4)),
    st.tuples(st.just("evict"), st.integers(1, 5)),
    st.tuples(st.just("roll back"), st.integers(1, 6)),
    st.tuples(st.just("reset"), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(STEPS, max_size=25), seed=st.integers(0, 2**20))
def test_traces_equal_a_dictionary_by_layer_head_and_position(
    steps: list[tuple[str, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    traces, books = Traces(N_TRACE), dict[tuple[int, int, int], Any]()
    pos = np.full((N_LAYER, N_HEAD_KV, N_CELLS), -1, np.int32)
    n_past = n_used = 0
    for what, n in [*steps, ("append", 0)]:
        if what == "append":
            n = min(n, N_CELLS - n_used)
            for il, ih in np.ndindex(N_LAYER, N_HEAD_KV):
                pos[il, ih, np.flatnonzero(pos[il, ih] < 0)[:n]] = np.arange(n_past, n_past + n)
            n_past, n_used = n_past + n, n_used + n
            traces.drop_from(n_past - n)  # as the observer says it: a batch of n began there
            books = {key: value for key, value in books.items() if key[2] < n_past - n}
            assert traces.n_seen <= n_past - n
        elif what == "evict":
            n = min(n, n_used)
            for il, ih in np.ndindex(N_LAYER, N_HEAD_KV):
                victims = rng.permutation(np.flatnonzero(pos[il, ih] >= 0))[:n]
                for cell in victims:
                    books.pop((il, ih, int(pos[il, ih, cell])), None)
                pos[il, ih, victims] = -1
                pos[il, ih] = rng.permutation(pos[il, ih])  # survivors move
            n_used -= n
        elif what == "roll back":
            # Exact rollbacks remove positions that every head still holds.
            newest = [set(head[head >= 0].tolist()) for layer in pos for head in layer]
            while n > 0 and all(n_past - 1 in held for held in newest):
                n_past, n_used, n = n_past - 1, n_used - 1, n - 1
                pos[pos == n_past] = -1
        else:
            pos[:], n_past, n_used = -1, 0, 0
        held = pos >= 0
        expected = np.zeros((N_TRACE, *pos.shape))
        for il, ih, cell in np.argwhere(held):
            expected[:, il, ih, cell] = books.get((il, ih, int(pos[il, ih, cell])), 0.0)
        np.testing.assert_array_equal(traces.at(pos), expected)
        # A session holds entries without the empty cells, and may be loaded where there are more of these.
        saved = traces.save((0, 1))
        loaded = Traces(N_TRACE)
        if saved is not None:
            (saved,) = unpack(*pack([saved]))
            loaded.put(saved.pos, saved.numbers, saved.n_seen)
        wider = np.pad(pos[..., ::-1], [(0, 0), (0, 0), (3, 0)], constant_values=-1)
        np.testing.assert_array_equal(loaded.at(wider)[..., 3:], expected[..., ::-1])
        assert loaded.n_seen == traces.n_seen and not loaded.at(wider)[..., :3].any()
        if rng.random() < 0.7:  # the policy observes
            numbers = rng.integers(1, 1000, (N_TRACE, *pos.shape)).astype(np.float32)
            traces.put(pos.copy(), numbers, n_past)
            books = {
                (il, ih, int(pos[il, ih, cell])): numbers[:, il, ih, cell]
                for il, ih, cell in np.argwhere(held)
            }
            assert traces.n_seen == n_past
