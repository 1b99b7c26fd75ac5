"""H2OLlama with a budget of its own in every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_harness import english, model_path, open_llama, open_tiny

from h2o_gguf.calibration import calibrate
from h2o_gguf.chat import ChatSession
from h2o_gguf.cli.weighing import weigh
from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.explain.recording import Recording
from h2o_gguf.layer_budgets import read_layer_budgets
from h2o_gguf.models import read_shape
from h2o_gguf.policies import LayerBudgets, pyramid

N_BATCH = 64
PER_CELL = 3 * 64 * 2 * 2  # SmolLM2, one layer: KV heads, head_dim, K and V, float16


def used(llama: Any) -> list[int]:
    """Entries per KV head of each layer."""
    held = {il: group.used() for group in llama.engine.cache.groups for il in group.layer_ids}
    return [held[il] for il in sorted(held)]


def test_every_layer_gets_the_memory_its_budget_needs_and_keeps_it() -> None:
    budgets = pyramid(30, 256, 32)
    with open_llama(policy=LayerBudgets(budgets), n_batch=N_BATCH) as llama:
        result = llama(english(4500), max_tokens=20, temperature=0)
        assert used(llama) == list(budgets)
        cells = sum(-(-(budget + N_BATCH) // 256) * 256 for budget in budgets)
        assert result["kv"]["bytes"] == cells * PER_CELL
        assert (result["kv"]["policy"], result["kv"]["budget"]) == ("h2o+ by layer", 256)
        assert (
            result["kv"]["used"] == 256
            and result["kv"]["used"] + result["kv"]["evicted"] == result["kv"]["n_past"]
        )


def test_equal_budgets_say_what_the_policy_alone_says() -> None:
    prompt, texts = english(3000), []
    for options in ({"kv_budget": 128}, {"policy": LayerBudgets([128] * 30)}):
        with open_llama(n_batch=N_BATCH, **options) as llama:
            texts.append(llama(prompt, max_tokens=24, temperature=0)["choices"][0]["text"])
            assert llama.kv_report().bytes == 30 * 256 * PER_CELL
    assert texts[0] == texts[1]


def test_a_session_of_layers_goes_on_as_if_it_had_never_stopped() -> None:
    with open_llama(policy=LayerBudgets(pyramid(30, 96, 16)), n_batch=N_BATCH, pin=[(0, 8)]) as llama:
        llama(english(2500), max_tokens=4, temperature=0)
        state, before = llama.save_state(), (llama.kv_report(), used(llama))
        texts = []
        for _ in range(2):
            texts.append(go_on(llama))
            llama.load_state(state)
            assert (llama.kv_report(), used(llama)) == before
        assert texts[0] == texts[1]


def go_on(llama: Any) -> list[int]:
    tokens = llama.generate([], reset=False, temp=0)
    return [next(tokens) for _ in range(12)]


@pytest.mark.parametrize(("architecture", "n_evicted"), [("gemma3", 2), ("jamba", 2), ("deepseek2", 4)])
def test_budgets_are_of_the_layers_that_are_evicted_from(
    architecture: str, n_evicted: int, tmp_path: Path
) -> None:
    budgets = [80, 40] * (n_evicted // 2)
    options = {"build": {"n_layer": 4}, "n_batch": 32, "n_ctx": 256}
    with open_tiny(architecture, tmp_path, policy=LayerBudgets(budgets, "streaming"), **options) as llama:
        llama.eval([5 + i % 90 for i in range(400)])
        llama.engine.keep_budget()
        assert used(llama) == budgets
    with pytest.raises(OptionError, match=f"3 budgets, but entries are evicted from {n_evicted} layers"):
        open_tiny(architecture, tmp_path, policy=LayerBudgets([80, 40, 20]), **options)


def test_pins_must_fit_the_smallest_budget() -> None:
    with (
        open_llama(policy=LayerBudgets([64] * 29 + [16]), n_batch=32) as llama,
        pytest.raises(BudgetError, match="do not fit into a budget of 16"),
    ):
        llama.engine.pins = [(0, 20)]


def test_what_needs_one_cache_for_all_layers_is_refused() -> None:
    with open_llama(policy=LayerBudgets([64] * 29 + [32]), n_batch=32) as llama:
        with pytest.raises(OptionError, match="cannot be explained"):
            Recording(llama.engine)
        with pytest.raises(OptionError, match="ask each of the groups"):
            llama.engine.view()


def test_a_named_budget_is_split_over_the_layers() -> None:
    budgets = pyramid(30, 200, 4, beta=2)  # four sinks in every layer
    with open_llama(kv_budget=200, layer_budgets="pyramid:2", n_batch=N_BATCH) as llama:
        kv = llama(english(4500), max_tokens=4, temperature=0)["kv"]
        assert used(llama) == list(budgets) == list(kv["layer_budgets"])
        assert kv["used_bytes"] == sum(budgets) * PER_CELL
        assert inspected(llama, 200, "pyramid:2") == kv["bytes"]
        assert (kv["policy"], kv["budget"]) == ("h2o+ by layer", 200)


def inspected(llama: Any, budget: int, said: str) -> int | None:
    budgets = read_layer_budgets(said, llama.model_path)
    shape = read_shape(llama.model_path)
    return weigh(shape, budget, 0, N_BATCH, "f16", "f16", budgets).budget_bytes


def test_pyramidkv_is_pyramidkv_by_its_name_alone() -> None:
    """SnapKV's window of 32 in every layer, and the paper's slope of 20."""
    with open_llama(policy="pyramidkv", kv_budget=128, n_batch=N_BATCH) as llama:
        kv = llama(english(3000), max_tokens=2, temperature=0)["kv"]
        assert used(llama) == list(pyramid(30, 128, 32, beta=20))
        assert kv["policy"] == "pyramidkv"


def test_without_layers_a_report_has_no_budgets_by_layer() -> None:
    with open_llama(kv_budget=128, n_batch=N_BATCH) as llama:
        kv = llama(english(3000), max_tokens=2, temperature=0)["kv"]
        assert (kv["layer_budgets"], kv["used_bytes"]) == ([], 30 * 128 * PER_CELL)


def test_a_calibration_measures_less_loss_at_larger_budgets_and_none_without_eviction(
    tmp_path: Path,
) -> None:
    with open_llama(n_batch=N_BATCH) as llama:
        path = llama.model_path
    seen: list[tuple[int, int]] = []
    found = calibrate(
        path, english(6000), n_tokens=576, n_threads=1, progress=lambda n, total: seen.append((n, total))
    )
    assert found.layers == tuple(range(30))
    assert (found.budgets[0], found.budgets[-1]) == (16, 320)
    losses = np.array(found.losses)
    assert np.all(losses[:, -1] < 1e-9), "of 320 entries all were kept"
    assert losses[:, 0].sum() > losses[:, len(found.budgets) // 2].sum() > losses[:, -2].sum() > 0
    assert losses.max() < 2
    assert seen[-1] == (576, 576) and sorted(seen) == seen
    found.save(tmp_path / "c.json")
    with open_llama(kv_budget=96, layer_budgets=str(tmp_path / "c.json"), n_batch=N_BATCH) as llama:
        llama(english(3000), max_tokens=2, temperature=0)
        assert used(llama) == list(found.split(96).over(range(30), 4))
        assert min(used(llama)) >= 16, "of less nothing was measured"
    with pytest.raises(OptionError, match="was calibrated on"):
        open_tiny("llama", tmp_path, kv_budget=96, layer_budgets=str(tmp_path / "c.json"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_tokens": 512}, "513 to "),
        ({"n_tokens": 100_000}, "which this model's full cache can hold"),
        ({"policy": "none"}, "policy none evicts nothing"),
        ({"n_tokens": 600}, "the text has .* tokens, and 600 shall be read"),
    ],
)
def test_a_calibration_that_cannot_be_done_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        calibrate(model_path(), "too short", **options)


def test_a_chat_with_budgets_by_layer_answers_and_says_why_it_cannot_explain() -> None:
    with open_llama(policy="pyramidkv", kv_budget=128, n_batch=N_BATCH) as llama:
        session = ChatSession(llama, max_tokens=4)
        assert "".join(session.ask("Hello."))
        assert len(session.report().layer_budgets) == 30
        with pytest.raises(OptionError, match="budgets by layer cannot be explained"):
            session.explain()
