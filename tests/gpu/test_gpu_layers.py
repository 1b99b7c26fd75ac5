"""Layers on a GPU are evicted from as layers in host memory are: scores composed there, rows moved there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import kl, random_tokens, require_runtime
from tiny_models import build

pytestmark = pytest.mark.gpu


def run(path: Path, n_gpu_layers: int, cache_type: str) -> tuple[np.ndarray, list[set[int]], int]:
    """Logits of 400 tokens at budget 64, the positions each head holds, how often it was renumbered."""
    from h2o_gguf import H2OLlama

    rows: list[np.ndarray] = []
    with H2OLlama(
        str(path),
        kv_budget=64,
        n_batch=32,
        kv_block=8,
        n_gpu_layers=n_gpu_layers,
        type_k=cache_type,
        type_v=cache_type,
    ) as llm:
        llm.engine.on_logits = lambda _pos, logits: rows.append(logits.copy())
        llm.engine.prefill(random_tokens(400))
        pos = llm.engine.cache.pos
        held = [set(head[head >= 0].tolist()) for head in pos.reshape(-1, pos.shape[-1])]
        return np.concatenate(rows), held, llm.engine.report().n_rebases


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_gpu_layers_keep_what_host_layers_keep(cache_type: str, tmp_path: Path) -> None:
    require_runtime()
    import llama_cpp

    if not llama_cpp.llama_supports_gpu_offload():
        pytest.skip("this runtime was built without a GPU backend, or no GPU is here")
    path = build("llama", tmp_path / "m.gguf")
    host, host_held, host_rebases = run(path, 0, cache_type)
    gpu, gpu_held, gpu_rebases = run(path, -1, cache_type)
    assert host_rebases == gpu_rebases > 0
    assert np.median(kl(host, gpu)) < 1e-3
    shared = [len(a & b) / len(a) for a, b in zip(host_held, gpu_held, strict=True)]
    assert min(shared) > 0.8, "sums differ by rounding, so a few close calls may fall otherwise"
