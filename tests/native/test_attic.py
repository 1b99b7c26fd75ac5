"""Evicted entries stay in the attic and come back as they were, for every kind of model and cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from attic_harness import (
    EVICTED,
    N_RECENT,
    N_SINK,
    N_UBATCH,
    ONLY_FLASH,
    ROOM,
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
from harness import TYPES, Run, opened, policy_of, random_tokens
from numpy.typing import NDArray
from tiny_models import build

from h2o_gguf.policies import LayerBudgets


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("models") / "llama.gguf")


def check_exchange(run: Run) -> None:
    """What comes back is bit for bit what went; what is protected stays; nothing is held twice."""
    seen = Seen(run)
    seen.feed(random_tokens(150))
    make_room(run)
    before, there = cached(run), stored(run)
    n_past = run.cache.groups[0].n_past()
    keep = (n_past - 60, n_past - 40)
    recall_next(run, [keep])
    assert np.isfinite(run.decode(random_tokens(8, seed=3))).all()
    check_books(run)
    after, back = cached(run), recalled(run)
    assert back and back <= there and back == {at for at in after - before if at[3] < n_past}
    assert total(run, "n_recalled") == len(back)
    assert {
        at for at in before if at[3] < N_SINK or at[3] >= n_past - N_RECENT or keep[0] <= at[3] < keep[1]
    } <= after
    for at, (rope, key, value) in rows_of(run).items():
        if at[3] < n_past:
            assert rope == seen.rows[at][0]
            assert np.array_equal(key, seen.rows[at][1]) and np.array_equal(value, seen.rows[at][2]), at


@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("arch", EVICTED)
def test_what_is_recalled_is_what_was_evicted(arch: str, flash: bool, tmp_path: Path) -> None:
    with with_attic(build(arch, tmp_path / "m.gguf"), flash=flash) as run:
        check_exchange(run)


@pytest.mark.parametrize("kind", TYPES)
def test_rows_of_every_type_come_back_bit_for_bit(kind: str, model: Path) -> None:
    with with_attic(model, type_k=kind, type_v=kind) as run:
        check_exchange(run)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in ONLY_FLASH])
def test_and_so_where_values_lie_in_columns(kind: str, model: Path) -> None:
    with with_attic(model, type_k=kind, type_v=kind, flash=False) as run:
        check_exchange(run)


@pytest.mark.parametrize("attention", ["composed", "reference"])
@pytest.mark.parametrize("n_threads", [1, 3])
def test_and_so_with_any_attention_and_threads(attention: str, n_threads: int, model: Path) -> None:
    with with_attic(model, attention=attention, n_threads=n_threads) as run:
        check_exchange(run)


@pytest.mark.parametrize("arch", ["llama", "deepseek2", "gemma3"])
def test_layers_with_budgets_of_their_own_recall_from_attics_of_their_own(arch: str, tmp_path: Path) -> None:
    path = build(arch, tmp_path / "m.gguf", n_layer=4)
    with opened(path, budget=0) as run:
        layers = run.cache.layer_ids
    budgets = {il: (64, 40)[i % 2] for i, il in enumerate(layers)}
    cells = [budgets.get(il, 0) + N_UBATCH for il in range(4)]
    policy = LayerBudgets(list(budgets.values()), "h2o+", {"n_recent": N_RECENT}, layers=list(budgets))
    options = {"n_ctx": 512, "n_ubatch": N_UBATCH, "block": 8, "decay": policy.decay}
    with opened(path, layer_cells=cells, budgets=budgets, **options) as run:
        policy_of(run, policy)
        open_attics(run)
        check_exchange(run)


def test_sequences_have_attics_of_their_own(model: Path) -> None:
    tokens = random_tokens(150, seed=5)
    with with_attic(model) as run:
        run.feed(tokens, N_UBATCH)
        recall_next(run)
        expected = run.decode(random_tokens(8, seed=6))
        there = stored(run)
    with with_attic(model, n_seq=3) as run:
        for seq in (0, 2):
            run.speak_of(seq, [])
            run.feed(random_tokens(120 + 10 * seq, seed=seq), N_UBATCH)
        run.speak_of(1, [])
        run.feed(tokens, N_UBATCH)
        recall_next(run)
        got = run.decode(random_tokens(8, seed=6))
        assert stored(run) == there
        assert np.array_equal(got, expected)
        for seq in (0, 2):
            run.speak_of(seq, [])
            check_books(run)
            assert total(run, "n_recalled") == 0
        n_of_another = total(run, "n_entry")
        run.speak_of(1, [])
        assert run.remove(0) and total(run, "n_entry") == 0
        run.speak_of(2, [])
        assert total(run, "n_entry") == n_of_another


def decode_together(run: Run, tokens: dict[int, list[int]]) -> NDArray[np.float32]:
    """One batch of several sequences: the logits of all, one sequence after the other."""
    n = sum(map(len, tokens.values()))
    batch = run.lib.llama_batch_init(n, 0, 1)
    rows = [(seq, i, token) for seq, each in tokens.items() for i, token in enumerate(each)]
    first = {seq: run.lib.llama_memory_seq_pos_max(run.memory, seq) + 1 for seq in tokens}
    batch.n_tokens = n
    for row, (seq, i, token) in enumerate(rows):
        batch.token[row], batch.pos[row], batch.n_seq_id[row], batch.logits[row] = token, first[seq] + i, 1, 1
        batch.seq_id[row][0] = seq
    assert run.lib.llama_decode(run.ctx, batch) == 0
    run.lib.llama_batch_free(batch)
    return np.ctypeslib.as_array(run.lib.llama_get_logits(run.ctx), (n, run.n_vocab)).copy()


@pytest.mark.parametrize("n_exact", [0, 5])
@pytest.mark.parametrize("recalling", [(0, 1, 2), (0, 2), (1,)])
@pytest.mark.parametrize("sizes", [(8, 8, 8), (8, 3, 5)])
def test_sequences_of_one_batch_recall_what_they_would_alone(
    sizes: tuple[int, ...], recalling: tuple[int, ...], n_exact: int, model: Path
) -> None:
    found, logits = [], []
    for is_together in (False, True):
        with with_attic(model, n_seq=3) as run:
            for seq in range(3):
                run.speak_of(seq, [])
                history(run, 120 + 10 * seq)
            turns = {seq: random_tokens(size, seed=10 + seq) for seq, size in enumerate(sizes)}
            for seq, turn in turns.items():
                run.speak_of(seq, [])
                if seq in recalling:
                    recall_next(run, n_exact=n_exact)
                if not is_together:
                    logits.append(run.decode(turn))
            if is_together:
                together = decode_together(run, turns)
            books = []
            for seq in range(3):
                run.speak_of(seq, [])
                check_books(run)
                books.append((recalled(run), stored(run)))
                assert bool(books[-1][0]) == (seq in recalling)
            found.append(books)
    if len(set(sizes)) == 1:  # others are computed in several ubatches, each of which recalls
        assert found[0] == found[1]
        np.testing.assert_allclose(together, np.concatenate(logits), atol=1e-4)


def test_many_sequences_of_one_batch_recall(tmp_path: Path) -> None:
    """What llama.cpp makes room for in a graph does not grow with them."""
    n_seq = 24
    path = build("llama", tmp_path / "m.gguf", n_layer=8)
    with with_attic(path, attic={"max_bytes": 2 * ROOM}, n_seq=n_seq, n_ubatch=2 * n_seq) as run:
        for seq in range(n_seq):
            run.speak_of(seq, [])
            history(run, 70)
        for seq in range(n_seq):
            run.speak_of(seq, [])
            recall_next(run, n_exact=2)
        logits = decode_together(run, {seq: random_tokens(2, seed=seq) for seq in range(n_seq)})
        assert np.isfinite(logits).all()
        for seq in range(n_seq):
            run.speak_of(seq, [])
            assert recalled(run)


def test_no_more_come_back_than_are_asked_for(model: Path) -> None:
    with with_attic(model) as run:
        history(run)
        recall_next(run, n_most=3)
        run.decode(random_tokens(8, seed=3))
        by_head = np.array([[view.sum() for view in layer] for layer in run.cache.view().recalled])
        assert (by_head == 3).any() and (by_head <= 3).all()
        recall_next(run, n_most=0)
        run.decode(random_tokens(8, seed=4))
        assert not recalled(run), "those of the last recall count as others now"


def test_a_recall_is_of_one_batch_whether_it_succeeds_or_not(model: Path) -> None:
    with with_attic(model) as run:
        history(run)
        recall_next(run)
        run.decode(random_tokens(8, seed=3))
        n, back = total(run, "n_recalled"), recalled(run)
        run.decode(random_tokens(1, seed=4))
        assert total(run, "n_recalled") == n and recalled(run) <= back
        recall_next(run)
        run.cache.set_policy(lambda view, n: None)  # names nobody
        code, _ = run.try_decode(random_tokens(N_UBATCH))
        assert code != 0
        assert run.cache.raised() is not None
        assert total(run, "n_recalled") == n
        run.cache.set_params(budget=200, block=8, decay=1.0)
        run.decode(random_tokens(1, seed=4))
        assert total(run, "n_recalled") == n, "the recall went with the batch it was for"


def test_a_recall_that_is_withdrawn_is_not_made(model: Path) -> None:
    with with_attic(model) as run:
        history(run)
        here, there = cached(run), stored(run)
        recall_next(run)
        run.cache.attic.withdraw()
        run.cache.attic.withdraw()  # where there is none
        run.decode(random_tokens(8, seed=1))
        assert total(run, "n_recalled") == 0 and not recalled(run)
        assert here <= cached(run) and stored(run) == there
        make_room(run)
        recall_next(run)
        run.decode(random_tokens(8, seed=2))
        assert total(run, "n_recalled") > 0, "the next one is"


def test_withdrawing_one_sequences_recall_leaves_the_others(model: Path) -> None:
    with with_attic(model, n_seq=2) as run:
        history(run)
        first = run.tokens
        run.speak_of(1, [])
        history(run, 120)
        for seq, tokens in ((0, first), (1, run.tokens)):
            run.speak_of(seq, tokens)
            recall_next(run)
        run.cache.attic.withdraw()
        run.speak_of(0, first)
        run.decode(random_tokens(8, seed=1))
        assert total(run, "n_recalled") > 0
