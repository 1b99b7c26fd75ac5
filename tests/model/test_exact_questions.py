"""A question about a text that was read whole and then evicted is answered as by the full cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import kl
from llama_harness import english, open_llama, open_tiny
from numpy.typing import NDArray

N_BATCH = 256  # the text is one, so that its own tokens see all of it
BUDGET = N_BATCH // 4
QUESTION = b" What is the special magic number for the quiet harbour of Eastwick? The number is"
FACT = " One of the special magic numbers for the quiet harbour of Eastwick is: 4408367."


def answered(kv_budget: int, *, recalls: bool = True, **options: Any) -> NDArray[np.float32]:
    """The logits behind the question."""
    options = {"n_batch": N_BATCH, "n_ubatch": N_BATCH, "n_ctx": 1024, **options}
    with open_llama(kv_budget=kv_budget, **options) as llm:
        llm.engine.recalls.is_on = recalls
        fact = llm.tokenize(FACT.encode())
        text = llm.tokenize(english(2400).encode())[: N_BATCH - len(fact)]
        llm.engine.prefill([*text[:40], *fact, *text[40:]])
        assert llm.engine.cache.used() == min(kv_budget, N_BATCH)
        llm.engine.prefill(llm.tokenize(QUESTION), recall=True)
        return np.array(llm.engine._logits)


@pytest.mark.parametrize("options", [{}, {"type_k": 8, "type_v": 8}, {"policy": "streaming"}], ids=str)
def test_its_first_token_is_chosen_from_the_same_logits(options: dict[str, Any]) -> None:
    """As nearly as products of eight-bit activations, which may round otherwise, let two kernels be."""
    full = answered(900, **options)
    exact, plain = (kl(full, answered(BUDGET, recalls=on, attic="ram", **options)) for on in (True, False))
    assert exact < 0.01 < 0.05 < plain


def test_where_the_attic_is_of_another_type_they_are_nearly_the_same() -> None:
    assert 0 < kl(answered(900), answered(BUDGET, attic="disk", attic_type="q8_0")) < 0.01


@pytest.mark.parametrize("n_batch", [16, 64, 512])
@pytest.mark.parametrize("n", [330, 448, 512])
def test_a_prompt_whose_end_evicts_its_beginning_too(n: int, n_batch: int, tmp_path: Path) -> None:
    """Its last 256 tokens attend to all of it, and the others were read before anything was evicted."""

    def logits(kv_budget: int, **options: Any) -> NDArray[np.float32]:
        options = {"n_ctx": 1024, "n_batch": n_batch, "n_ubatch": n_batch, **options}
        with open_tiny(
            "llama", tmp_path, build={"n_ctx_train": 2048}, kv_budget=kv_budget, type_k=0, type_v=0, **options
        ) as llm:
            llm.engine.sync([(7 * i * i + 3 * i) % 251 + 1 for i in range(n)])
            return np.array(llm.engine._logits)

    full, exact, plain = logits(900), logits(256, attic="ram"), logits(256)
    assert np.abs(exact - full).max() < 1e-4 * np.abs(full).max()
    assert n_batch == 512 or np.abs(plain - full).max() > 1e-2 * np.abs(full).max()
