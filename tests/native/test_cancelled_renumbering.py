"""Whoever cancels while positions are renumbered gets a cancelled reading, and whole keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import random_tokens, require_runtime
from tiny_models import build

from h2o_gguf.cancel import CancelToken
from h2o_gguf.errors import Cancelled

HISTORY, NEXT = random_tokens(230), random_tokens(32, seed=5)


def opened(path: Path) -> Any:
    from h2o_gguf import H2OLlama

    llm = H2OLlama(
        str(path),
        policy="streaming",
        kv_budget=64,
        n_ctx=512,
        n_batch=32,
        n_recent=16,
        attic="ram",
        n_threads=1,
    )
    llm.engine.recalls.is_on = False  # a batch that was cancelled may have exchanged entries
    llm.engine.prefill(HISTORY)
    return llm


@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_keys_are_turned_all_or_none(arch: str, tmp_path: Path) -> None:
    """Asked before each node of each graph in turn, as llama.cpp asks, until reading ends without."""
    require_runtime()
    from h2o_gguf.native import C

    path = build(arch, tmp_path / "m.gguf", n_ctx_train=256)
    with opened(path) as llm:
        assert llm.kv_report().n_rebases == 0
        llm.engine.prefill(NEXT)
        assert llm.kv_report().n_rebases == 1
        expected = llm.engine.logits.copy()
    n_cancelled = 0
    for stop in (*range(1, 30), 100, 10**9):
        with opened(path) as llm:
            n_asked = 0

            def should_stop(_data: Any, stop: int = stop) -> bool:
                nonlocal n_asked
                n_asked += 1
                return n_asked == stop

            context = llm.engine.context
            context._abort, ours = C.ggml_abort_callback(should_stop), context._abort
            try:
                llm.engine.prefill(NEXT, cancel=CancelToken())
            except Cancelled:
                n_cancelled += 1
                context._abort = ours
                assert llm.engine.tokens == HISTORY
                llm.engine.prefill(NEXT)
            # Keys that are turned once more are rounded once more; turned wrongly, logits were off by 5.
            np.testing.assert_allclose(llm.engine.logits, expected, atol=2e-2)
    assert n_cancelled >= 29
