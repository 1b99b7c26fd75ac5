"""Layers with caches of their own size: each keeps its own budget, and all of them say the same sequence."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Run, kl, opened, policy_of, random_tokens, require_runtime
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import build, native

from h2o_gguf.errors import BudgetError, OptionError, StateFileError
from h2o_gguf.policies import LayerBudgets, make

BLOCK, N_UBATCH, N_RECENT = 8, 32, 12
BUDGETS = {0: 96, 1: 40, 2: 24, 3: 40}
KNOBS = {"n_recent": N_RECENT}
PLAIN = [
    "llama",
    "gptneox",
    "qwen2vl",
    "deepseek2",
    "deepseek2-mha",
]  # the last two: keys and values apart, and not
MIXED = ["gemma3", "gemma2", "gpt-oss", "jamba", "lfm2"]  # beside windows or recurrent layers


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "llama.gguf", n_layer=4, n_ctx_train=256)


@contextlib.contextmanager
def by_layer(path: Path, budgets: Mapping[int, int] = BUDGETS, **options: Any) -> Iterator[Run]:
    """A context whose layers have the cells their budgets need, h2o+ naming victims."""
    cells = [budgets.get(il, 0) + N_UBATCH for il in range(n_layers(path))]
    policy = LayerBudgets(list(budgets.values()), "h2o+", KNOBS, layers=list(budgets))
    options = {"n_ctx": 512, "n_ubatch": N_UBATCH, "block": BLOCK, "decay": policy.decay, **options}
    with opened(path, layer_cells=cells, budgets=budgets, **options) as run:
        policy_of(run, policy)
        yield run


def n_layers(path: Path) -> int:
    with native.model(path) as loaded:
        return int(native.library()[0].llama_model_n_layer(loaded))


def evicted_layers(path: Path) -> tuple[int, ...]:
    with opened(path, budget=0) as run:
        ids: tuple[int, ...] = run.cache.layer_ids
        return ids


def budgets_for(path: Path, sizes: Sequence[int]) -> dict[int, int]:
    """These budgets, in turn, for the layers of a model that are evicted from."""
    return {il: sizes[i % len(sizes)] for i, il in enumerate(evicted_layers(path))}


def newest_rope_pos(group: Any) -> Any:
    view = group.view()
    return view.rope_pos[view.pos == view.n_past - 1]


def check(run: Run, n_recent: int) -> None:
    """The invariants of the design, in each group."""
    rollback_min = run.cache.rollback_min()
    assert rollback_min <= max(0, len(run.tokens) - n_recent), "I3"
    for group in run.cache.groups:
        view = group.view()
        occupied = view.pos >= 0
        assert (occupied == occupied[0, 0]).all(), "I1"
        assert view.n_past == len(run.tokens)
        assert view.n_used == occupied[0, 0].sum()
        assert group.rollback_min() == rollback_min, "whichever is asked"
        for positions in view.pos.reshape(-1, view.pos.shape[-1]):
            held = set(positions[positions >= 0].tolist())
            assert len(held) == view.n_used, "no position twice"
            assert set(range(max(0, view.n_past - n_recent), view.n_past)) <= held, "I3"
            assert set(range(min(4, view.n_past))) <= held, "sinks"
        assert (view.scores[~occupied] == 0).all() and (view.scores >= 0).all()
        assert view.rope_pos.max() < group.info.n_pos_max
    if n_recent > 0:
        ends = {int(p) for group in run.cache.groups for p in newest_rope_pos(group)}
        assert len(ends) == 1, "the newest token has one rotary position"


def test_layers_of_equal_budget_share_a_cache_of_the_cells_they_need(model: Path) -> None:
    with by_layer(model) as run:
        groups = run.cache.groups
        assert [group.layer_ids for group in groups] == [(0,), (1, 3), (2,)]
        assert [group.n_cells for group in groups] == [256, 256, 256], "multiples of 256"
    sizes = {0: 600, 1: 40, 2: 300, 3: 40}
    with by_layer(model, sizes, n_ctx=1024) as run, opened(model, n_ctx=1024, budget=0) as plain:
        groups = run.cache.groups
        assert [group.n_cells for group in groups] == [768, 256, 512]
        per_cell = plain.cache.kv_bytes // (4 * 1024)
        assert [group.kv_bytes for group in groups] == [per_cell * n for n in (768, 2 * 256, 512)]
        assert run.cache.kv_bytes == per_cell * (768 + 2 * 256 + 512)


def test_the_memory_that_llama_cpp_reports_is_that_of_all_layers(model: Path) -> None:
    lib, _ = native.library()
    bindings = require_runtime()
    with native.model(model) as loaded:
        address = ctypes.cast(loaded, ctypes.c_void_p).value
        bindings.set_layer_cells(address, [512, 256, 0, 256])
        with native.context(loaded, n_ctx=1024) as (_, log):
            sizes = sorted(n_cells for _, n_cells, _, _ in native.logged_sizes(log))
        assert sizes == [256, 512, 1024], "0 is as many as the context"
        bindings.set_layer_cells(address, [])
        with native.context(loaded, n_ctx=1024) as (_, log):
            assert [n_cells for _, n_cells, _, _ in native.logged_sizes(log)] == [1024], "forgotten"
        bindings.set_layer_cells(address, [0, 0, 0, 2000])
        params = lib.llama_context_default_params()
        params.n_ctx = 1024
        assert not lib.llama_init_from_model(loaded, params), "more than the context"


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("arch", [*PLAIN, *MIXED])
def test_budgets_never_reached_change_no_bit(arch: str, flash: bool, tmp_path: Path) -> None:
    """I5: caches of three sizes against llama.cpp's one, prompt and generation, without and with h2og."""
    path = build(arch, tmp_path / "m.gguf", n_layer=4)
    tokens = random_tokens(120)
    budgets = budgets_for(path, (400, 150, 250))
    cells = [budgets.get(il, 0) for il in range(n_layers(path))]
    shared = {"n_ctx": 512, "flash": flash}
    for params in ({}, {"attention": "fused", "block": BLOCK}):
        with opened(path, **shared, **({"budget": 0, **params} if params else {})) as run:
            expected = np.concatenate([run.feed(tokens[:80], 32), run.feed(tokens[80:], 1)])
        groups = {"budgets": budgets, **params} if params else {}
        with opened(path, layer_cells=cells, **shared, **groups) as run:
            got = np.concatenate([run.feed(tokens[:80], 32), run.feed(tokens[80:], 1)])
            if params:
                assert len(run.cache.groups) == min(3, len(budgets))
        assert np.array_equal(expected, got), f"I5 with {params}"


@pytest.mark.parametrize("name", ["h2o+", "streaming"])
def test_equal_budgets_are_the_plain_cache_bit_for_bit(name: str, model: Path) -> None:
    tokens = random_tokens(400)
    options = {"n_ubatch": N_UBATCH, "block": BLOCK, "decay": make(name, 48).decay}
    with opened(model, budget=48, **options) as run:
        policy_of(run, make(name, 48))
        expected = np.concatenate([run.feed(tokens[:300], N_UBATCH), run.feed(tokens[300:], 1)])
        assert run.cache.n_evicted > 300 and run.cache.n_rebases > 0
        pos, scores = run.cache.pos.copy(), run.cache.scores.copy()
    with opened(model, layer_cells=[200] * 4, budgets=dict.fromkeys(range(4), 48), **options) as run:
        policy_of(run, LayerBudgets([48] * 4, name))
        got = np.concatenate([run.feed(tokens[:300], N_UBATCH), run.feed(tokens[300:], 1)])
        (group,) = run.cache.groups
        assert np.array_equal(group.pos, pos) and np.array_equal(group.scores, scores)
    assert np.array_equal(expected, got)


def test_equal_budgets_in_caches_of_their_own_are_the_plain_cache_bit_for_bit(model: Path) -> None:
    """Cells 100 and 101 are two caches of 256, with one budget: every part at work, and nothing different."""
    tokens = random_tokens(400)
    options = {"n_ubatch": N_UBATCH, "block": BLOCK, "decay": make("h2o+", 48).decay, "n_observed": 6}
    with opened(model, budget=48, **options) as run:
        policy_of(run, make("h2o+", 48))
        expected = np.concatenate([run.feed(tokens[:300], N_UBATCH), run.feed(tokens[300:], 1)])
        pos, scores, n_rebases = run.cache.pos.copy(), run.cache.scores.copy(), run.cache.n_rebases
        seen = run.cache.view().observation
        queries, keys = [seen.queries(row) for row in range(4)], [seen.keys(row) for row in range(4)]
    cells = [100, 101, 100, 101]
    with opened(model, layer_cells=cells, budgets=dict.fromkeys(range(4), 48), **options) as run:
        policy_of(run, LayerBudgets([48] * 4))
        got = np.concatenate([run.feed(tokens[:300], N_UBATCH), run.feed(tokens[300:], 1)])
        assert [group.layer_ids for group in run.cache.groups] == [(0, 2), (1, 3)]
        assert run.cache.n_rebases == n_rebases > 0
        for group in run.cache.groups:
            rows = list(group.layer_ids)
            assert np.array_equal(group.pos, pos[rows]) and np.array_equal(group.scores, scores[rows])
            seen = group.view().observation
            for row, il in enumerate(rows):
                assert np.array_equal(seen.queries(row), queries[il]) and seen.queries(row).any()
                assert np.array_equal(seen.keys(row), keys[il])
    assert np.array_equal(expected, got)


@pytest.mark.parametrize("arch", [*PLAIN, *MIXED])
def test_every_layer_holds_its_budget(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf", n_layer=4)
    budgets = budgets_for(path, (96, 40))
    with by_layer(path, budgets) as run:
        assert len(run.cache.groups) == 2
        assert np.isfinite(run.feed(random_tokens(700), N_UBATCH)).all()
        assert np.isfinite(run.feed(random_tokens(60, seed=1), 1)).all()
        for group in run.cache.groups:
            assert group.used() <= budgets[group.layer_ids[0]] + BLOCK
        run.cache.make_room(1000)
        for group in run.cache.groups:
            assert group.used() == budgets[group.layer_ids[0]]
        check(run, 0 if run.lib.llama_model_is_hybrid(run.model) else N_RECENT)


step = st.one_of(
    st.tuples(st.just("decode"), st.integers(1, N_UBATCH)),
    st.tuples(st.just("rollback"), st.integers(1, N_RECENT)),
    st.tuples(st.just("room"), st.integers(20, 96)),
    st.tuples(st.just("rebase"), st.just(0)),
    st.tuples(st.just("clear"), st.just(0)),
)


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(step, min_size=30, max_size=60))
def test_invariants_hold_in_each_group_under_random_histories(
    model: Path, steps: list[tuple[str, int]]
) -> None:
    tokens = iter(random_tokens(3000))
    n_recent = 0
    with by_layer(model) as run:
        for kind, n in steps:
            if kind == "decode":
                run.decode([next(tokens) for _ in range(n)])
                n_recent = min(N_RECENT, n_recent + n)
                for group in run.cache.groups:
                    assert group.used() <= BUDGETS[group.layer_ids[0]] + max(BLOCK, n)
            elif kind == "rollback" and run.cache.rollback_min() <= len(run.tokens) - n:
                assert run.remove(len(run.tokens) - n)
                n_recent = max(0, n_recent - n)
            elif kind == "room":
                run.cache.make_room(n)
            elif kind == "rebase" and run.tokens:
                run.cache.groups[n % 3].rebase()
            elif kind == "clear" and len(run.tokens) > 200:
                assert run.remove(0)
                n_recent = 0
                assert run.cache.used() == 0
            if run.tokens:
                check(run, n_recent)


def test_a_rollback_is_refused_where_one_group_cannot_follow(model: Path) -> None:
    tokens = random_tokens(90)
    with by_layer(model) as run:
        run.feed(tokens[:72], 24)
        small, large = run.cache.groups[2], run.cache.groups[0]
        assert small.n_evicted > 0 and large.n_evicted == 0
        before = [group.pos.copy() for group in run.cache.groups]
        for p0, p1 in ((1, -1), (0, 3), (run.cache.rollback_min() - 1, -1)):
            assert not run.remove(p0, p1)
        for group, pos in zip(run.cache.groups, before, strict=True):
            assert np.array_equal(group.pos, pos), "nothing is lost in any group"
        run.cache.make_room(96)
        once = run.feed(tokens[72 : 72 + BLOCK], 1)
        assert run.remove(72)
        assert np.array_equal(run.feed(tokens[72 : 72 + BLOCK], 1), once)


def test_saved_state_goes_on_as_if_never_saved(model: Path) -> None:
    tokens = random_tokens(400)
    with by_layer(model) as run:
        run.feed(tokens[:300], N_UBATCH)
        assert run.cache.n_rebases > 0
        size = run.lib.llama_state_get_size(run.ctx)
        state = (ctypes.c_uint8 * size)()
        assert run.lib.llama_state_get_data(run.ctx, state, size) == size
        ours = run.cache.save()
        kept = [group.pos.copy() for group in run.cache.groups]
        expected = run.feed(tokens[300:], 10)
    with by_layer(model) as run:
        run.feed(tokens[50:90], 20)
        assert run.lib.llama_state_set_data(run.ctx, state, size) == size
        run.cache.load(ours)
        run.tokens = tokens[:300]
        for group, pos in zip(run.cache.groups, kept, strict=True):
            assert np.array_equal(group.pos, pos)
        check(run, N_RECENT)
        assert np.array_equal(run.feed(tokens[300:], 10), expected)
        for damaged in (b"", ours[:7], ours[:40], ours[:-1], ours + b"x"):
            with pytest.raises(StateFileError):
                run.cache.load(damaged)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "deepseek2"])
def test_a_run_renumbered_often_follows_one_never_renumbered(arch: str, tmp_path: Path) -> None:
    """As with one cache: only a plain window can be compared, here one of its own length in each layer."""
    path = build(arch, tmp_path / "m.gguf", n_layer=4, n_ctx_train=4096)
    budgets = budgets_for(path, (72, 40))
    tokens = random_tokens(500, seed=9)
    results = []
    for n_pos_max in (4000, 120):
        with by_layer(path, budgets, n_pos_max=n_pos_max, type_k="f32", type_v="f32") as run:
            knobs = {"n_sink": 0, "n_recent": 24}
            policy_of(run, LayerBudgets(list(budgets.values()), "streaming", knobs, layers=list(budgets)))
            results.append(run.feed(tokens, 16))
            assert run.cache.n_rebases == 0 if n_pos_max == 4000 else run.cache.n_rebases > 5
            assert all(int(group.rope_pos.max()) < n_pos_max for group in run.cache.groups)
    assert kl(results[0], results[1]).max() < 1e-4


def test_composed_scores_are_those_of_the_kernel_in_each_group(model: Path) -> None:
    scores = []
    for attention in ("reference", "composed", "fused"):
        with by_layer(model, attention=attention) as run:
            run.feed(random_tokens(150), N_UBATCH)
            scores.append([np.sort(group.scores.sum((0, 1))) for group in run.cache.groups])
            assert all(group.scores.sum() > 0 for group in run.cache.groups)
    for other in scores[1:]:
        for a, b in zip(scores[0], other, strict=True):
            assert np.abs(a - b).max() < 0.02 * a.max()


def test_what_does_not_fit_is_refused_in_words(model: Path) -> None:
    bindings = require_runtime()
    with native.model(model) as loaded:
        address = ctypes.cast(loaded, ctypes.c_void_p).value
        for cells in ([1, 2, 3], [-1, 0, 0, 0]):
            with pytest.raises(Exception, match=r"3 layers: the model has 4|layer 0 cannot have -1"):
                bindings.set_layer_cells(address, cells)
    for budgets, words in (
        ({**BUDGETS, 3: 41}, r"layers 1, 3 share a cache of 256 cells .* 40, 41"),
        ({**BUDGETS, 2: 300}, "a budget of 300 does not fit"),
    ):
        cells = [300, 99, 50, 99]
        with (
            pytest.raises(BudgetError, match=words),
            opened(model, n_ctx=512, layer_cells=cells, budgets=budgets),
        ):
            pass
    with by_layer(model) as run:
        run.cache.set_policy(lambda _view, _n: (_ for _ in ()).throw(OptionError("in the policy", "policy")))
        run.feed(random_tokens(32), 32)
        with pytest.raises(OptionError, match="in the policy"):
            run.decode(random_tokens(20))
        assert run.cache.used() == 32
