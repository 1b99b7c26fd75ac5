"""Layers on a GPU are evicted from as layers in host memory are: scores composed there, rows moved there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from harness import kl, random_tokens, require_runtime
from tiny_models import build

from h2o_gguf.policies import Streaming

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


def require_gpu() -> None:
    require_runtime()
    import llama_cpp

    if not llama_cpp.llama_supports_gpu_offload():
        pytest.skip("this runtime was built without a GPU backend, or no GPU is here")


@pytest.mark.parametrize("cache_type", ["f16", "q8_0"])
def test_gpu_layers_keep_what_host_layers_keep(cache_type: str, tmp_path: Path) -> None:
    require_gpu()
    path = build("llama", tmp_path / "m.gguf")
    host, host_held, host_rebases = run(path, 0, cache_type)
    gpu, gpu_held, gpu_rebases = run(path, -1, cache_type)
    assert host_rebases == gpu_rebases > 0
    assert np.median(kl(host, gpu)) < 1e-3
    shared = [len(a & b) / len(a) for a, b in zip(host_held, gpu_held, strict=True)]
    assert min(shared) > 0.8, "sums differ by rounding, so a few close calls may fall otherwise"


class Watching(Streaming):
    n_observed = 8


def test_queries_of_gpu_layers_are_recorded_there(tmp_path: Path) -> None:
    """In one layer they depend on token and position alone, whatever was evicted."""
    from h2o_gguf import H2OLlama

    require_gpu()
    path = build("llama", tmp_path / "m.gguf", n_layer=1)
    queries = []
    for n_gpu_layers in (0, -1):
        with H2OLlama(
            str(path), policy=Watching(64), n_batch=32, kv_block=8, n_gpu_layers=n_gpu_layers
        ) as llm:
            llm.engine.prefill(random_tokens(400))
            seen = llm.engine.cache.view().observation
            assert seen.query_pos.tolist() == list(range(392, 400))
            queries.append(seen.queries(0))
    np.testing.assert_allclose(queries[1], queries[0], atol=1e-2 * np.abs(queries[0]).max())
