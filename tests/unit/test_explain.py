"""Departures and attention of an explanation, against a record of everything the cache ever held."""

from __future__ import annotations

import os
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import opened, random_tokens
from llama_harness import open_tiny
from numpy.typing import NDArray
from tiny_models import build

from h2o_gguf.cancel import CancelToken
from h2o_gguf.documents import Document
from h2o_gguf.errors import Cancelled, OptionError
from h2o_gguf.explain import HELD, Recording, explain, explain_reply, recording
from h2o_gguf.explain.attention import glances
from h2o_gguf.explain.explanation import HEAVY_SHARE, heavy_hitters, token_texts
from h2o_gguf.policies import H2O
from h2o_gguf.view import CacheView

Floats = NDArray[np.float32]


class LastSeen:
    """The plain reference: looks at every entry after every batch."""

    def __init__(self, cache: Any) -> None:
        self.seen: dict[tuple[int, int, int], int] = {}
        self._cache = cache
        cache.set_observer(lambda view, _: self._look(view.pos, view.n_past))

    def departures(self, n_past: int) -> NDArray[np.int32]:
        """As Recording.departures: an entry left when it was seen last, unless it is still here."""
        left = np.full((self._cache.n_layer, self._cache.n_head_kv, n_past), -1, np.int32)
        for place, when in self.seen.items():
            left[place] = when
        self._look(self._cache.pos, HELD)
        for place, when in self.seen.items():
            left[place] = HELD if when == HELD else left[place]
        return left

    def _look(self, pos: NDArray[np.int32], n_past: int) -> None:
        for row, head, cell in np.argwhere(pos >= 0):
            self.seen[int(row), int(head), int(pos[row, head, cell])] = n_past


def rows_of(pos: NDArray[np.int32], mass: Floats, n: int) -> NDArray[np.float64]:
    """Mass by position: float64[n_layer, n_head_kv, n]."""
    rows = np.zeros((*pos.shape[:2], n))
    for row, head, cell in np.argwhere(pos >= 0):
        rows[row, head, pos[row, head, cell]] += mass[row, head, cell]
    return rows


@pytest.mark.parametrize("policy", ["h2o+", "h2o", "random", "streaming"])
def test_departures_are_those_of_a_record_of_every_batch(policy: str, tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy=policy, kv_budget=40, n_batch=16, kv_block=8) as llm:
        recorded, seen = Recording(llm.engine), LastSeen(llm.engine.cache)
        for n, seed in ((150, 0), (3, 1), (70, 2)):
            llm.engine.prefill(random_tokens(n, seed))
        left = recorded.history().left
        assert left.shape == (2, 2, 223) and np.unique(left).size > 5
        np.testing.assert_array_equal(left, seen.departures(223))
        assert (left == HELD).sum(-1).tolist() == [[40, 40], [40, 40]]


def test_departures_stay_true_through_rollback_and_reset(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16, kv_block=8) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(200))
        llm.engine.reset()
        seen = LastSeen(llm.engine.cache)
        llm.engine.prefill(random_tokens(100, 1))
        assert llm.engine.rollback(95)
        llm.engine.prefill(random_tokens(30, 2))
        np.testing.assert_array_equal(recorded.history().left, seen.departures(125))


def test_departures_of_a_restored_sequence_are_its_own(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16, kv_block=8) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(100))
        before, state = recorded.history().left, llm.save_state()
        llm.engine.prefill(random_tokens(100, 1))
        llm.load_state(state)
        np.testing.assert_array_equal(recorded.history().left, before)


def test_what_left_before_the_recording_left_at_its_beginning(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16, kv_block=8) as llm:
        llm.engine.prefill(random_tokens(100))
        left = Recording(llm.engine).history().left
        assert set(np.unique(left).tolist()) == {100, HELD}
        assert (left == 100).sum(-1).tolist() == [[60, 60], [60, 60]]


def test_a_sequence_too_long_to_record_is_refused_until_a_new_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_TOKENS", 150)
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16, kv_block=8) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(200))
        with pytest.raises(OptionError, match="has 200 tokens, and what left is recorded for 150"):
            recorded.history()
        llm.engine.reset()
        seen = LastSeen(llm.engine.cache)
        llm.engine.prefill(random_tokens(120, 1))
        np.testing.assert_array_equal(recorded.history().left, seen.departures(120))


@pytest.mark.parametrize(("n_most", "n_said"), [(60, r"\d{3}"), (150, r"1[5-9]\d")])
def test_a_text_too_long_to_record_is_refused_while_it_is_read(
    n_most: int, n_said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice too long at once, else when it has come so far."""
    monkeypatch.setattr(recording, "MAX_TOKENS", n_most)
    seen: list[int] = []
    with open_tiny("llama", tmp_path, kv_budget=200, n_batch=16, kv_block=8) as llm:
        document = Document(BytesIO(b"to be or not to be " * 12), "play", 12 * 19)
        with pytest.raises(OptionError, match=f"has {n_said} tokens.* {n_most} at most: take a part"):
            explain(llm, document, question="?", instruction="", progress=lambda p: seen.append(p.n_read))
    assert (len(seen) == 0) if n_most == 60 else seen[-1] <= n_most < seen[-1] + 16


def test_the_replay_sees_the_attention_of_the_first_reading(tmp_path: Path) -> None:
    """The plain sums of h2o grow by what each query, decoded alone, gives the entries that stay."""
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16, kv_block=8) as llm:
        recorded, engine = Recording(llm.engine), llm.engine
        tokens = random_tokens(140)
        engine.prefill(tokens[:120])
        given: dict[int, NDArray[np.float64]] = {}
        for p in range(120, 140):
            engine.keep_budget()
            before = rows_of(engine.cache.pos, engine.cache.scores, 140)
            engine.prefill(tokens[p : p + 1])
            after = engine.cache
            stays = rows_of(after.pos, np.ones(after.pos.shape, np.float32), 140) > 0
            given[p] = np.where(stays, rows_of(after.pos, after.scores, 140) - before, np.nan)
        for glance in glances(llm, tokens, range(120, 140), recorded.history()):
            found, wanted = rows_of(glance.pos, glance.mass, 140), given[glance.query]
            stays = ~np.isnan(wanted)
            assert stays[..., : glance.query].any() and not found[..., glance.query + 1 :].any()
            np.testing.assert_allclose(found[stays], wanted[stays], atol=2e-4)


def test_missed_attention_is_what_a_full_cache_gives_to_entries_that_were_gone(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "llama.gguf")
    tokens, n_prompt, n_answer = random_tokens(130), 120, 10
    full: list[NDArray[np.float64]] = []
    with opened(path, n_ctx=256, budget=0, decay=1.0) as run:
        before = np.zeros((2, 2, 130))
        run.feed(tokens[: n_prompt - 1], 17)
        before = rows_of(run.cache.pos, run.cache.scores, 130)
        for p in range(n_prompt - 1, n_prompt - 1 + n_answer):
            run.decode(tokens[p : p + 1])
            after = rows_of(run.cache.pos, run.cache.scores, 130)
            full.append(after - before)
            before = after
    with open_tiny("llama", tmp_path, policy="h2o+", kv_budget=40, n_batch=16, kv_block=8) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(tokens[:n_prompt])
        for p in range(n_prompt, 130):
            llm.engine.prefill(tokens[p : p + 1])
        e = explain_reply(llm, recorded, n_prompt, tokens[n_prompt:])
    assert e.missed is not None and e.kept.shape == e.missed.shape == (n_answer, 130)
    np.testing.assert_allclose(e.kept.sum(-1), 1, atol=1e-5)
    assert e.missed_by_head is not None
    gone = [np.where(e.left <= n_prompt - 1 + i, row, 0) / 2 for i, row in enumerate(full)]
    np.testing.assert_allclose(e.missed_by_head, np.mean(gone, 0), atol=2e-4)
    np.testing.assert_allclose(e.kept_by_head.mean((0, 1)), e.kept.mean(0), atol=1e-6)
    for i, row in enumerate(full):
        is_gone = e.left <= n_prompt - 1 + i
        assert is_gone.any()
        np.testing.assert_allclose(row.sum(), 2 * 4, rtol=1e-4)  # every query of 2 layers x 4 heads spends 1
        np.testing.assert_allclose(e.missed[i], np.where(is_gone, row, 0).sum((0, 1)) / 8, atol=2e-4)
        assert not e.kept[i][is_gone.all((0, 1))].any()


@pytest.mark.parametrize("architecture", ["gemma3", "jamba", "deepseek2", "gpt2", "gpt-oss"])
def test_every_kind_of_cache_that_is_evicted_from_is_explained(architecture: str, tmp_path: Path) -> None:
    with open_tiny(architecture, tmp_path, policy="h2o+", kv_budget=48, n_batch=16, kv_block=8) as llm:
        recorded, tokens = Recording(llm.engine), random_tokens(150)
        llm.engine.prefill(tokens[:140])
        for token in tokens[140:]:
            llm.engine.prefill([token])
        e = explain_reply(llm, recorded, 140, tokens[140:])
        assert e.missed is not None
        np.testing.assert_allclose(e.kept.sum(-1), 1, atol=1e-5)
        is_gone = (e.left <= 139).all((0, 1))
        assert is_gone.any() and not e.kept[:, is_gone].any() and (e.missed[:, is_gone] > 0).all()
        assert ((e.missed.sum(-1) > 0) & (e.missed.sum(-1) < 1)).all()


@pytest.mark.parametrize("policy", ["h2o+", "streaming"])
def test_a_text_shorter_than_a_sliding_window_is_explained(policy: str, tmp_path: Path) -> None:
    build_with = {"n_swa": 300, "n_ctx_train": 512}  # the window and a batch are more than 256 cells
    with open_tiny("gemma3", tmp_path, build=build_with, policy=policy, kv_budget=48, n_batch=16) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(30))
        e = explain_reply(llm, recorded, 28, llm.engine.tokens[28:])
        np.testing.assert_allclose(e.kept.sum(-1), 1, atol=1e-5)


def test_nothing_is_missed_where_nothing_left(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, kv_budget=128) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(60))
        e = explain_reply(llm, recorded, 50, llm.engine.tokens[50:])
        assert e.missed is not None and not e.missed.any()
        assert (e.held() == e.n_pairs).all()
        assert (e.held(20) == np.where(np.arange(60) < 20, 4, 0)).all()


def test_the_sequence_and_its_logits_are_left_alone(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(100))
        tokens, pos = list(llm.engine.tokens), llm.engine.cache.pos.copy()
        scores, logits = llm.engine.cache.scores.copy(), llm.engine.logits.copy()
        explain_reply(llm, recorded, 95, tokens[95:])
        assert llm.engine.tokens == tokens
        np.testing.assert_array_equal(llm.engine.cache.pos, pos)
        np.testing.assert_array_equal(llm.engine.cache.scores, scores)
        np.testing.assert_array_equal(llm.engine.logits, logits)


def test_past_the_trained_context_only_the_full_cache_is_unknown(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(300))  # renumbered at 256
        assert llm.engine.report().n_rebases > 0
        e = explain_reply(llm, recorded, 290, llm.engine.tokens[290:])
        assert e.missed is None and "299 tokens and the model was trained to see 256" in e.why_not_missed
        np.testing.assert_allclose(e.kept.sum(-1), 1, atol=1e-5)


def test_a_model_whose_name_is_no_utf8_is_explained(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, kv_budget=128) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(20))
        llm.model_path = os.fsdecode(b"\xff.gguf")
        explain_reply(llm, recorded, 18, llm.engine.tokens[18:]).write(tmp_path / "page.html")
    assert "<title>\ufffd: why" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_an_answer_that_was_shown_but_not_read_is_explained_too(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(100))
        e = explain_reply(llm, recorded, 100, [7])
        assert (e.n_past, len(e.texts), e.kept.shape) == (100, 101, (1, 100))


def test_what_cannot_be_explained_is_said(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16) as llm:
        recorded = Recording(llm.engine)
        llm.engine.prefill(random_tokens(100))
        with pytest.raises(OptionError, match="no answer"):
            explain_reply(llm, recorded, 100, [])
        with pytest.raises(OptionError, match="not the end of what the cache holds"):
            explain_reply(llm, recorded, 90, [1, 2, 3])
        cancel = CancelToken()
        cancel.cancel()
        with pytest.raises(Cancelled):
            explain_reply(llm, recorded, 90, llm.engine.tokens[90:], cancel=cancel)
    with (
        open_tiny("llama", tmp_path, policy=None) as llm,
        pytest.raises(OptionError, match="nothing is ever"),
    ):
        Recording(llm.engine)


def test_a_second_recording_does_not_end_the_first(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16, kv_block=8) as llm:
        first, seen = Recording(llm.engine), LastSeen(llm.engine.cache)
        second = Recording(llm.engine)
        llm.engine.prefill(random_tokens(100))
        np.testing.assert_array_equal(first.history().left, second.history().left)
        second.close()
        llm.engine.prefill(random_tokens(100, 1))
        np.testing.assert_array_equal(first.history().left, seen.departures(200))


def test_the_first_recording_may_end_first(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16, kv_block=8) as llm:
        first = Recording(llm.engine)
        second, seen = Recording(llm.engine), LastSeen(llm.engine.cache)
        first.close()
        first.close()
        llm.engine.prefill(random_tokens(100))
        np.testing.assert_array_equal(second.history().left, seen.departures(100))
        second.close()
        assert llm.engine.on_evict == []


def test_a_closed_recording_is_told_nothing(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy="h2o", kv_budget=40, n_batch=16) as llm:
        recorded = Recording(llm.engine)
        recorded.close()
        assert llm.engine.on_evict == []
        llm.engine.prefill(random_tokens(100))
        assert llm.engine.report().evicted > 0


def test_heavy_hitters_are_the_tenth_with_the_highest_scores_that_may_go() -> None:
    rng = np.random.default_rng(0)
    n_cells, n_past, policy = 80, 300, H2O(64, n_sink=3, n_recent=20)
    pos = np.stack([rng.permutation(n_past)[:n_cells] for _ in range(6)]).reshape(2, 3, n_cells)
    pos[..., :5] = -1
    scores = rng.integers(0, 12, pos.shape).astype(np.float32)  # many equal ones
    view = CacheView(scores, pos.astype(np.int32), n_past, n_cells - 5, pins=((40, 60),))
    heavy = heavy_hitters(view, policy)
    for row in range(2):
        for head in range(3):
            may_go = [
                (-float(s), int(p))
                for s, p in zip(scores[row, head], pos[row, head], strict=True)
                if 3 <= p < n_past - 20 and not 40 <= p < 60
            ]
            n_top = -(-len(may_go) // round(1 / HEAVY_SHARE))
            wanted = {p for s, p in sorted(may_go)[:n_top] if s < 0}
            assert set(np.flatnonzero(heavy[row, head]).tolist()) == wanted


def test_texts_of_tokens_join_to_the_text_and_never_hold_half_a_character() -> None:
    class Vocab:
        def piece(self, token: int, special: bool) -> bytes:
            return bytes([token])

    data = "aé😀שׁ".encode() + b"\xff" + "日".encode()[:2]
    texts = token_texts(Vocab(), list(data))
    assert len(texts) == len(data)
    assert "".join(texts) == data.decode("utf-8", "replace")
    assert texts[:7] == ("a", "", "é", "", "", "", "😀")
