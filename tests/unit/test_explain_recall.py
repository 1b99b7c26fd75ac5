"""Entries that come back, in an explanation, against a record of everything the cache ever held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import random_tokens
from llama_harness import open_tiny
from numpy.typing import NDArray

from h2o_gguf.cancel import CancelToken
from h2o_gguf.errors import Cancelled
from h2o_gguf.evaluation.answering import Greedy
from h2o_gguf.explain import HELD, History, Recording, explain_reply
from h2o_gguf.explain.attention import glances

OPTIONS: dict[str, Any] = {"kv_budget": 40, "n_batch": 16, "kv_block": 8, "attic": "ram"}


def by_position(pos: NDArray[np.int32], n_past: int) -> NDArray[np.bool_]:
    """Which positions are among those of the cells: bool[n_layer, n_head_kv, n_past]."""
    found = np.zeros((*pos.shape[:2], n_past), np.bool_)
    for row, head, cell in np.argwhere(pos >= 0):
        found[row, head, pos[row, head, cell]] = True
    return found


class Kept:
    """The plain reference: what the cache held after every batch."""

    def __init__(self, cache: Any) -> None:
        self.after: dict[int, NDArray[np.bool_]] = {}
        self.fetched: dict[int, NDArray[np.bool_]] = {}  # of them, by the last recall
        cache.set_observer(lambda view, _: self._look(view.pos, view.recalled, view.n_past))

    def _look(self, pos: NDArray[np.int32], recalled: NDArray[np.bool_], n_past: int) -> None:
        self.fetched[n_past] = by_position(np.where(recalled, pos, -1), n_past)
        self.after[n_past] = by_position(pos, n_past)

    def assert_told_by(self, history: History) -> None:
        """Times are of what was read before a batch, and evictions come before it."""
        for n_past, held in self.after.items():
            np.testing.assert_array_equal(~history.gone(n_past - 1)[..., :n_past], held)


def ask(llm: Any, n: int, seed: int) -> None:
    llm.engine.prefill(random_tokens(n, seed), recall=True)


@pytest.mark.parametrize("policy", ["h2o+", "h2o", "random", "streaming"])
@pytest.mark.parametrize("attic", ["ram", "disk"])
def test_a_history_is_that_of_a_record_of_every_batch(policy: str, attic: str, tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, **(OPTIONS | {"policy": policy, "attic": attic})) as llm:
        recorded, kept = Recording(llm.engine), Kept(llm.engine.cache)
        llm.engine.prefill(random_tokens(150))
        for n, seed in ((20, 1), (3, 2), (40, 3), (1, 4)):
            ask(llm, n, seed)
        history = recorded.history()
        kept.assert_told_by(history)
        text, question = ["text"], ["question"]
        asked = [recall.asking for recall in history.recalls]
        # Of a text from the batch on that is the first to evict; of questions each.
        assert asked == 6 * text + (2 + 1 + 3 + 1) * question and len(history.gaps) > 20
        assert (history.gaps[:, 3] <= history.gaps[:, 4]).all()
        assert (~history.gone(214)).sum(-1).tolist() == [[40, 40], [40, 40]]


def test_recalled_are_those_that_were_away_and_are_back(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, **OPTIONS) as llm:
        recorded, kept = Recording(llm.engine), Kept(llm.engine.cache)
        llm.engine.prefill(random_tokens(150))
        for seed in range(3):
            ask(llm, 10, seed)
        history = recorded.history()
        was_away = np.zeros(history.left.shape, np.bool_)
        for n_past, held in kept.after.items():
            was_away[..., :n_past] |= ~held | kept.fetched[n_past]
            marked = history.recalled(n_past - 1)[..., : n_past - 1]
            np.testing.assert_array_equal(marked, (held & was_away[..., :n_past])[..., : n_past - 1])
        assert history.recalled(180).any() and not history.recalled(47).any()


def test_a_sequence_after_a_reset_knows_nothing_of_the_recalls_before(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, **OPTIONS) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(150))
        ask(llm, 20, 1)
        llm.engine.reset()
        assert len(recorded.history().gaps) == 0
        kept = Kept(llm.engine.cache)
        llm.engine.prefill(random_tokens(60, 3))
        assert len(recorded.history().gaps) == 0
        llm.engine.prefill(random_tokens(140, 4))
        ask(llm, 20, 5)
        history = recorded.history()
        kept.assert_told_by(history)
        assert [recall.asking for recall in history.recalls].count("question") == 2
        assert history.recalls[0].start == 60 and len(history.gaps) > 0


@pytest.mark.parametrize("n", [30, 45])
def test_recalls_before_a_reset_are_forgotten_before_the_first_one_after_it(n: int, tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, **(OPTIONS | {"recall_every": 1})) as llm:
        recorded, engine = Recording(llm.engine), llm.engine
        engine.prefill(random_tokens(150))
        ask(llm, 20, 1)
        engine.reset()
        kept = Kept(engine.cache)
        engine.prefill(random_tokens(n, 3))
        list(engine.generate(Greedy(), max_tokens=25))
        history = recorded.history()
        kept.assert_told_by(history)
        pos, left, back = history.gaps[:, 2:].T
        assert len(history.recalls) > 3 and (pos < left).all() and (left <= back).all()


def test_a_restored_sequence_has_its_own_recalls(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, **OPTIONS) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(150))
        ask(llm, 20, 1)
        before, state = recorded.history(), llm.save_state()
        llm.engine.prefill(random_tokens(100, 2))
        ask(llm, 20, 3)
        llm.load_state(state)
        after = recorded.history()
        np.testing.assert_array_equal(after.left, before.left)
        np.testing.assert_array_equal(after.gaps, before.gaps)


@pytest.mark.parametrize("n", [1, 5, 20])
def test_what_left_after_a_sequence_was_saved_is_not_told_once_it_is_restored(n: int, tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, **OPTIONS) as llm:
        recorded, engine = Recording(llm.engine), llm.engine
        engine.prefill(random_tokens(150))
        ask(llm, 20, 1)
        state, kept = llm.save_state(), Kept(engine.cache)
        engine.prefill(random_tokens(100, 2))
        ask(llm, 20, 3)
        llm.load_state(state)
        kept.after.clear()
        ask(llm, n, 4)
        ask(llm, 10, 5)
        history = recorded.history()
        kept.assert_told_by(history)
        assert min(history.evictions().values()) > 0


def test_recalls_that_were_taken_back_end_where_the_sequence_does(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, **OPTIONS) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(150))
        ask(llm, 5, 1)
        assert llm.engine.rollback(152)
        history = recorded.history()
        assert history.recalls[-1].end == 152 and history.gaps[:, 3:].max() <= 152
        np.testing.assert_array_equal(~history.gone(152), Recording(llm.engine).history().left == HELD)


@pytest.mark.parametrize("n_nodes", [20, 35, 50])
def test_what_a_cancelled_batch_exchanged_is_told_too(n_nodes: int, tmp_path: Path) -> None:
    from h2o_gguf.native import C

    with open_tiny("llama", tmp_path, **(OPTIONS | {"n_batch": 32, "recall_every": 0})) as llm:
        recorded, engine = Recording(llm.engine), llm.engine
        engine.prefill(random_tokens(150))
        n_before, n_asked, context = engine.attic.n_recalled, 0, engine.context

        def should_stop(_data: Any) -> bool:
            nonlocal n_asked
            n_asked += 1
            return n_asked > n_nodes

        context._abort, ours = C.ggml_abort_callback(should_stop), context._abort
        with pytest.raises(Cancelled):
            engine.prefill(random_tokens(64, 1), cancel=CancelToken())
        context._abort = ours
        assert engine.attic.n_recalled > n_before
        kept, n_prompt = Kept(engine.cache), engine.n_past
        reply = list(engine.generate(Greedy(), max_tokens=4))
        history = recorded.history()
        kept.assert_told_by(history)
        assert (history.left > np.arange(engine.n_past)).all()
        assert np.isfinite(explain_reply(llm, recorded, n_prompt, reply).kept).all()


@pytest.mark.parametrize("policy", ["h2o+", "h2o", "streaming"])
@pytest.mark.parametrize("granularity", ["head", "layer", "token"])
def test_a_replay_fetches_back_what_the_first_reading_did(
    policy: str, granularity: str, tmp_path: Path
) -> None:
    """But for the last of those whose neighbourhoods are attended to alike, where any may come first."""
    options = OPTIONS | {"policy": policy, "granularity": granularity}
    with open_tiny("llama", tmp_path, **options) as llm:
        recorded, kept, engine = Recording(llm.engine), Kept(llm.engine.cache), llm.engine
        engine.prefill(random_tokens(150))
        ask(llm, 12, 1)
        for token in random_tokens(30, 2):
            engine.prefill([token])
        history, found = recorded.history(), []
        for glance in glances(llm, engine.tokens, range(161, engine.n_past), history):
            n_read = glance.query + 1
            held, wanted = by_position(glance.pos, n_read), kept.after[n_read]
            assert (held.sum(-1) == wanted.sum(-1)).all()
            found.append(np.count_nonzero(held & wanted) / np.count_nonzero(wanted))
        n_back = np.count_nonzero(history.recalled(161)) / np.count_nonzero(history.held(161))
        assert min(found) > max(0.9, 1 - n_back / 2) and n_back > 0.05


def test_attention_to_recalled_entries_is_not_missed(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, **OPTIONS) as llm:
        recorded, engine = Recording(llm.engine), llm.engine
        engine.prefill(random_tokens(150))
        ask(llm, 12, 1)
        n_prompt = engine.n_past
        for token in random_tokens(6, 2):
            engine.prefill([token])
        e = explain_reply(llm, recorded, n_prompt, engine.tokens[n_prompt:])
        history = recorded.history()
        np.testing.assert_allclose(e.kept.sum(-1), 1, atol=1e-5)
        assert e.missed is not None and e.missed_by_head is not None
        back = history.recalled(n_prompt - 1) & history.recalled(engine.n_past)
        assert back.any() and not e.missed_by_head[back].any()
        np.testing.assert_array_equal(
            e.recalled(), np.count_nonzero(history.recalled(engine.n_past), axis=(0, 1))
        )
