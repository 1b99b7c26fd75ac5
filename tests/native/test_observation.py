"""What a policy reads of a cache agrees with what the attention did: keys, queries, sinks, rotation."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import ROTATED, WINDOWED, Run, evict_positions, opened, policy_of, random_tokens, view_of
from numpy.typing import NDArray
from tiny_models import ARCHITECTURES, build

from h2o_gguf.errors import H2OError
from h2o_gguf.models import query_bytes, read_shape
from h2o_gguf.policies import make

EVICTABLE = [name for name, expected in ARCHITECTURES.items() if expected.evicts]
N_OBSERVED = 8
TOKENS = random_tokens(120)
F32 = {"type_k": "f32", "type_v": "f32", "attention": "fused", "budget": 0}
# Logits of up to 10 and more are float32, so their probabilities are off by a few 2^-24 * 10.
CLOSE = 1e-5


def last_token_difference(run: Run, tokens: Sequence[int]) -> float:
    """Largest difference, over all entries, between view.attention of the last token and what was summed.

    Decodes the tokens, of whose queries only the last has a weight.
    """
    before = run.cache.scores.copy()
    run.cache.set_query_weights(np.eye(len(tokens), dtype=np.float32)[-1])
    run.decode(tokens)
    view = view_of(run.cache.view())
    assert view.seen.query_pos[-1] == view.n_past - 1
    shares = [view.attention(row)[:, :, -1].sum(1) for row in range(len(before))]
    return float(np.abs(np.array(shares) - (view.scores - before)).max())


def queries_of(run: Run) -> NDArray[np.float32]:
    """Of all layers: float32[n_layer, n_head_kv, n_group, n_observed, head_dim_k]."""
    seen = run.cache.view().observation
    return np.array([seen.queries(row) for row in range(run.cache.n_layer)])


def query_pos(run: Run) -> list[int]:
    positions: list[int] = run.cache.view().observation.query_pos.tolist()
    return positions


@pytest.mark.parametrize("attention", ["fused", "composed", "reference"])
@pytest.mark.parametrize("arch", EVICTABLE)
def test_attention_of_a_view_is_what_the_layer_computed(arch: str, attention: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf")
    with opened(path, **{**F32, "attention": attention}, n_observed=N_OBSERVED) as run:
        run.feed(TOKENS[:60], 20)
        assert last_token_difference(run, TOKENS[60:65]) < CLOSE
        assert last_token_difference(run, TOKENS[65:66]) < CLOSE
        assert last_token_difference(run, TOKENS[66:86]) < CLOSE


@pytest.mark.parametrize("cache_type", ["f16", "bf16", "q8_0", "q4_0"])
@pytest.mark.parametrize("arch", ["llama", "gemma2", "gpt-oss", "deepseek2"])
def test_queries_agree_with_keys_of_every_type(arch: str, cache_type: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf")
    with opened(
        path, type_k=cache_type, type_v=cache_type, budget=0, attention="fused", n_observed=N_OBSERVED
    ) as run:
        run.feed(TOKENS[:60], 20)
        assert last_token_difference(run, TOKENS[60:65]) < CLOSE


@pytest.mark.parametrize(
    ("cache_type", "flash"),
    [("f32", True), ("f16", True), ("q8_0", True), ("q4_0", True), ("f32", False), ("f16", False)],
)
def test_single_cells_read_as_all_of_them_do(cache_type: str, flash: bool, tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    cells = np.array([5, 6, 7, 40, 2, 41], np.int32)
    with opened(path, type_k=cache_type, type_v=cache_type, flash=flash, budget=0) as run:
        run.feed(TOKENS[:60], 20)
        seen = run.cache.view().observation
        for row in range(run.cache.n_layer):
            np.testing.assert_array_equal(seen.keys(row, cells), seen.keys(row)[:, cells])
            np.testing.assert_array_equal(seen.values(row, cells), seen.values(row)[:, cells])
        assert np.abs(seen.values(0, cells)).max(-1).min() > 0
        for wrong in ([-1], [run.cache.n_cells]):
            with pytest.raises(H2OError, match="does not exist"):
                run.cache.keys(0, np.array(wrong))


def test_queries_do_not_depend_on_the_type_of_the_keys(tmp_path: Path) -> None:
    """llama.cpp multiplies both with a matrix where keys are quantized; what is read is free of it."""
    path = build("llama", tmp_path / "m.gguf", n_layer=1)
    seen = []
    for cache_type in ("f32", "q8_0"):
        with opened(path, type_k=cache_type, budget=0, n_observed=N_OBSERVED) as run:
            run.feed(TOKENS[:60], 20)
            seen.append((queries_of(run), run.cache.keys(0)))
    np.testing.assert_allclose(seen[1][0], seen[0][0], atol=1e-5 * np.abs(seen[0][0]).max())
    np.testing.assert_allclose(seen[1][1], seen[0][1], atol=2**-7 * np.abs(seen[0][1]).max())


@pytest.mark.parametrize("attention", ["fused", "composed"])
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_the_newest_are_recorded_however_batches_are_cut(chunk: int, attention: str, tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf", n_layer=1)
    results = []
    for size in (60, chunk):
        with opened(path, budget=0, attention=attention, n_observed=N_OBSERVED) as run:
            run.feed(TOKENS[:60], size)
            assert query_pos(run) == list(range(52, 60))
            results.append(queries_of(run))
    np.testing.assert_allclose(results[1], results[0], atol=1e-5 * np.abs(results[0]).max())


def test_before_there_are_enough_the_oldest_are_empty(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with opened(path, budget=0, n_observed=N_OBSERVED) as run:
        assert query_pos(run) == [-1] * 8
        run.feed(TOKENS[:3], 3)
        assert query_pos(run) == [-1] * 5 + [0, 1, 2]
        queries = queries_of(run)
        assert not queries[..., :5, :].any() and queries[..., 5:, :].any(-1).all()
        attention = view_of(run.cache.view()).attention(0)
        assert not attention[:, :, :5].any() and (attention[:, :, 5:].argmax(-1) < 3).all()


def test_a_rollback_drops_the_queries_of_what_is_removed(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with opened(path, budget=0, n_observed=N_OBSERVED) as run:
        run.feed(TOKENS[:40], 10)
        before = queries_of(run)
        assert run.remove(37)
        assert query_pos(run) == [-1] * 3 + list(range(32, 37))
        assert np.array_equal(queries_of(run)[..., 3:, :], before[..., :5, :])
        run.decode(TOKENS[50:52])
        assert query_pos(run) == [-1, *range(32, 39)]
        assert np.array_equal(queries_of(run)[..., 1:6, :], before[..., :5, :])
        assert run.remove(20)
        assert query_pos(run) == [-1] * 8
        run.decode(TOKENS[20:40])
        assert query_pos(run) == list(range(32, 40))
        run.lib.llama_memory_clear(run.memory, True)
        assert query_pos(run) == [-1] * 8


@pytest.mark.parametrize("attention", ["fused", "composed"])
@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt-oss", "deepseek2", "qwen2vl"])
def test_attention_is_right_after_evictions_and_renumberings(
    arch: str, attention: str, tmp_path: Path
) -> None:
    path = build(arch, tmp_path / "m.gguf", n_ctx_train=128)
    options = {**F32, "budget": 64, "block": 16, "attention": attention}
    with opened(path, n_ctx=512, n_ubatch=32, n_observed=N_OBSERVED, **options) as run:
        policy_of(run, make("h2o+", 64))
        run.feed(random_tokens(300), 25)
        run.cache.make_room(48)
        n_rebases = run.cache.n_rebases
        assert n_rebases > 0
        run.cache.rebase()
        assert last_token_difference(run, TOKENS[:5]) < CLOSE
        assert run.cache.n_rebases == n_rebases + 1


@pytest.mark.parametrize("arch", ROTATED)
def test_renumbering_turns_queries_to_where_they_would_be_now(arch: str, tmp_path: Path) -> None:
    """In one layer queries depend on token and position alone: those of a context that got what was kept."""
    path = build(arch, tmp_path / "m.gguf", n_layer=1)
    gone = [*range(3, 60, 2), 70, 71, 72]
    with opened(path, n_observed=N_OBSERVED, **F32) as fresh:
        fresh.feed([t for i, t in enumerate(TOKENS[:100]) if i not in gone], 20)
        expected = queries_of(fresh)
    with opened(path, n_observed=N_OBSERVED, **F32) as run:
        run.feed(TOKENS[:100], 20)
        before = queries_of(run)
        evict_positions(run, gone)
        run.cache.rebase()
        got = queries_of(run)
        assert query_pos(run) == list(range(92, 100))
    scale = np.abs(expected).max()
    # A float32 angle of up to 100 radians is off by up to 4e-6 at either end.
    np.testing.assert_allclose(got, expected, atol=1e-4 * scale)
    assert np.abs(before - expected).max() > 0.1 * scale, "they were turned at all"


@pytest.mark.parametrize("arch", [*ROTATED, *WINDOWED])
def test_a_rotation_turns_keys_as_renumbering_does(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf")
    with opened(path, **F32) as run:
        run.feed(TOKENS[:100], 20)
        evict_positions(run, [*range(3, 60, 2), 70, 71, 72])
        before = [run.cache.keys(row) for row in range(run.cache.n_layer)]
        moved_from = run.cache.rope_pos.copy()
        run.cache.rebase()
        by = run.cache.rope_pos - moved_from
        assert len(np.unique(by)) > 20
        for row, keys in enumerate(before):
            rotation = run.cache.view().observation.rotation(row)
            got = np.empty_like(keys)
            for steps in np.unique(by[row]):
                at = by[row] == steps
                got[at] = rotation.turned(keys[at], int(steps))
            np.testing.assert_allclose(got, run.cache.keys(row), atol=1e-5 * np.abs(keys).max())


def test_a_layer_without_positions_has_no_rotation(tmp_path: Path) -> None:
    for arch in ("gpt2", "jamba"):
        with opened(build(arch, tmp_path / "m.gguf"), budget=0) as run:
            assert run.cache.view().observation.rotation(0) is None


def test_values_of_compressed_caches_are_the_first_part_of_their_keys(tmp_path: Path) -> None:
    with opened(build("deepseek2", tmp_path / "m.gguf"), **F32) as run:
        run.decode(TOKENS[:20])
        seen = run.cache.view().observation
        values = seen.values(1)
        assert values.shape == (1, run.cache.n_cells, run.cache.info.head_dim_v)
        assert values.any() and np.array_equal(values, seen.keys(1)[..., : values.shape[-1]])


class Watching:
    """Evicts the oldest, after looking at everything there is to see."""

    name, budget, n_sink, n_recent, n_observed = "watching", 64, 0, 16, N_OBSERVED

    def __init__(self) -> None:
        self.n_looks = 0

    def victims(self, view: Any, n: int) -> NDArray[np.int32]:
        self.n_looks += 1
        assert view.seen.query_pos.tolist() == list(range(view.n_past - N_OBSERVED, view.n_past))
        for row in range(view.shape[0]):
            np.testing.assert_allclose(view.attention(row).sum(-1), 1, rtol=1e-5)
            assert view.seen.values(row).shape == view.seen.keys(row).shape
        order = np.where(view.pos < 0, view.n_past, view.pos).argsort(-1)
        return order[..., :n].astype(np.int32)


@pytest.mark.parametrize("attention", ["fused", "composed"])
def test_a_policy_sees_them_while_room_is_made(attention: str, tmp_path: Path) -> None:
    from h2o_gguf.policies import as_policy

    path = build("llama", tmp_path / "m.gguf")
    policy = Watching()
    with opened(
        path, n_ubatch=32, budget=64, block=8, attention=attention, is_scored=False, n_observed=N_OBSERVED
    ) as run:
        policy_of(run, as_policy(policy))
        run.feed(random_tokens(200), 20)
        run.feed(random_tokens(20), 1)
    assert policy.n_looks > 5


def test_the_python_api_records_what_its_policy_declares(tmp_path: Path) -> None:
    from h2o_gguf import H2OLlama

    policy = Watching()
    path = build("llama", tmp_path / "m.gguf")
    with H2OLlama(str(path), policy=policy, n_batch=32, kv_block=8, n_threads=1) as llm:
        llm.engine.prefill(random_tokens(200))
    assert policy.n_looks > 3


@pytest.mark.parametrize("attention", ["auto", "fused", "composed", "reference"])
def test_recording_costs_no_bit_of_the_logits(attention: str, tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    logits = []
    for n_observed in (0, N_OBSERVED):
        with opened(path, budget=0, attention=attention, n_observed=n_observed) as run:
            logits.append(np.concatenate([run.feed(TOKENS[:40], 32), run.feed(TOKENS[40:48], 1)]))
            assert len(query_pos(run)) == n_observed and queries_of(run).shape[-2] == n_observed
    assert np.array_equal(*logits)


def saved(run: Run) -> tuple[Any, int, bytes]:
    size = run.lib.llama_state_get_size(run.ctx)
    state = (ctypes.c_uint8 * size)()
    assert run.lib.llama_state_get_data(run.ctx, state, size) == size
    return state, size, run.cache.save()


def load(run: Run, state: tuple[Any, int, bytes]) -> None:
    assert run.lib.llama_state_set_data(run.ctx, state[0], state[1]) == state[1]
    run.cache.load(state[2])


def test_a_saved_state_has_the_queries(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf", n_ctx_train=128)
    options = {**F32, "n_ctx": 512, "n_ubatch": 32, "budget": 64, "block": 8}
    with opened(path, n_observed=N_OBSERVED, **options) as run:
        policy_of(run, make("h2o+", 64))
        run.feed(random_tokens(300), 25)
        assert run.cache.n_rebases > 0
        state, expected = saved(run), queries_of(run)
    for n_observed, n_kept in ((N_OBSERVED, 8), (5, 5), (11, 8), (0, 0)):
        with opened(path, n_observed=n_observed, **options) as run:
            policy_of(run, make("h2o+", 64))
            run.feed(random_tokens(30, seed=1), 25)
            load(run, state)
            assert query_pos(run) == [-1] * (n_observed - n_kept) + list(range(300 - n_kept, 300))
            got = queries_of(run)[..., n_observed - n_kept :, :]
            assert np.array_equal(got, expected[..., 8 - n_kept :, :])
            if n_observed:
                run.cache.make_room(50)
                assert last_token_difference(run, TOKENS[:5]) < CLOSE
                newest = [p for p in range(300 - n_kept, 305)][-n_observed:]
                assert query_pos(run) == [-1] * (n_observed - len(newest)) + newest


def test_a_state_without_queries_loads_with_none(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with opened(path, budget=0) as run:
        run.feed(TOKENS[:40], 20)
        state = saved(run)
    with opened(path, budget=0, n_observed=N_OBSERVED) as run:
        run.feed(TOKENS[:20], 20)
        load(run, state)
        assert query_pos(run) == [-1] * 8
        run.decode(TOKENS[40:43])
        assert query_pos(run) == [-1] * 5 + [40, 41, 42]


def test_recording_can_begin_and_end(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with opened(path, budget=0) as run:
        run.decode(TOKENS[:20])
        for n_observed in (4, 0, 6):
            run.cache.set_params(budget=0, block=64, decay=1.0, n_observed=n_observed)
            run.decode(TOKENS[:10])
            assert query_pos(run) == list(range(run.cache.n_past() - n_observed, run.cache.n_past()))
        before = queries_of(run)
        run.cache.set_params(budget=0, block=64, decay=0.5, n_observed=6)
        assert np.array_equal(queries_of(run), before), "another parameter leaves them alone"


@pytest.mark.parametrize("arch", EVICTABLE)
def test_recorded_queries_take_what_is_planned(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf", n_layer=4)
    with opened(path, n_ctx=512, budget=0, n_observed=10) as run:
        assert run.cache.info.query_bytes == 4 * queries_of(run).size == query_bytes(read_shape(path), 10)


@pytest.mark.parametrize("attention", ["fused", "composed"])
@pytest.mark.parametrize("n_nodes", [1, 40])
def test_a_batch_that_was_broken_off_leaves_no_query(attention: str, n_nodes: int, tmp_path: Path) -> None:
    """llama.cpp takes its tokens back; others come to their positions."""
    path = build("llama", tmp_path / "m.gguf")
    with opened(path, **{**F32, "attention": attention}, n_observed=N_OBSERVED) as run:
        run.feed(TOKENS[:40], 20)
        calls = 0

        def stops(_: Any) -> bool:
            nonlocal calls
            calls += 1
            return calls > n_nodes

        callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(stops)
        run.lib.llama_set_abort_callback(run.ctx, callback, None)
        code, _ = run.try_decode(TOKENS[100:105])
        run.lib.llama_set_abort_callback(run.ctx, ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(), None)
        assert code == 2 and calls > n_nodes
        assert query_pos(run)[-3:] == [37, 38, 39]
        assert last_token_difference(run, TOKENS[40:45]) < CLOSE
        assert query_pos(run) == list(range(37, 45))
