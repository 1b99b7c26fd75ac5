"""H2OLlama with a budget of its own in every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from llama_harness import english, open_llama, open_tiny

from h2o_gguf.errors import BudgetError, OptionError
from h2o_gguf.explain.recording import Recording
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
