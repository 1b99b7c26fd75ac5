"""What repeats an earlier passage is read as with a full cache, though the passage was evicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from llama_harness import english, open_llama
from numpy.typing import NDArray

N_BATCH = 64
FACT = " One of the special magic numbers for the quiet harbour of Eastwick is: 4408367."
OTHER = " One of the special magic numbers for the crowded market of Northgate is: 7291543."


def text() -> str:
    words = english(2400).split(" ")
    third = len(words) // 3
    parts = [" ".join(words[i : i + third]) for i in (0, third)]
    return parts[0] + FACT + parts[1] + OTHER


def newest_values(llm: Any, n: int) -> NDArray[np.float32]:
    """Values of the newest entries, which all heads hold: float32[n_layer, n_head_kv, n, head_dim]."""
    cache, n_past = llm.engine.cache, llm.engine.n_past
    found = []
    for layer, pos in enumerate(cache.pos):
        values = cache.values(layer)
        cells = np.argsort(pos, axis=-1)[:, -n:]
        assert (np.take_along_axis(pos, cells, -1) == np.arange(n_past - n, n_past)).all()
        found.append(np.take_along_axis(values, cells[..., None], 1))
    return np.stack(found)


def read(kv_budget: int, *, with_texts: bool = True, **options: Any) -> NDArray[np.float32]:
    with open_llama(kv_budget=kv_budget, n_batch=N_BATCH, n_ctx=1024, **options) as llm:
        llm.engine.recalls.with_texts = with_texts
        tokens = llm.tokenize(text().encode())
        llm.engine.prefill(tokens[: len(tokens) % N_BATCH])
        llm.engine.prefill(tokens[len(tokens) % N_BATCH :])  # the last batch is a whole one
        return newest_values(llm, 12)


@pytest.mark.parametrize("policy", ["h2o+", "streaming"])
def test_a_repeated_passage_comes_nearer_to_the_full_caches(policy: str) -> None:
    full = read(1000, policy=policy)
    with_attic = {"policy": policy, "attic": "ram"}
    off, on = (np.linalg.norm(read(96, with_texts=on, **with_attic) - full) for on in (False, True))
    assert on < 0.5 * off
    np.testing.assert_array_equal(
        read(96, with_texts=False, **with_attic), read(96, policy=policy), "without, an attic only fills"
    )
