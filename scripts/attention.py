"""How far our attention is from llama.cpp's, beside how far llama.cpp's own variants are from each other.

    python scripts/attention.py [MODEL] [-n 640] [--out docs/figures/attention]

Nothing is evicted. The same tokens are read by llama.cpp with and without flash attention and by our kernels.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from report import environment, model_file, save, table

from h2o_gguf import H2OLlama
from h2o_gguf.evaluation import rows
from h2o_gguf.evaluation.texts import prose

VARIANTS = {
    "llama.cpp, flash attention": {"policy": "none"},
    "llama.cpp, without": {"policy": "none", "flash_attn": False},
    "ours, composed": {"attention": "composed"},
    "ours, fused": {"attention": "fused"},
    "ours, reference": {"attention": "reference"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model if left out")
    parser.add_argument("-n", type=int, default=640, help="tokens read")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = model_file(args.model)
    logp: dict[str, NDArray[np.float32]] = {}
    for name, options in VARIANTS.items():
        size = {"n_ctx": args.n + args.batch} if "policy" in options else {"kv_budget": args.n + args.batch}
        with H2OLlama(model, n_batch=args.batch, **size, **options, n_threads=args.threads) as llm:
            tokens = llm.tokenize(prose().encode())[: args.n]
            logp[name] = np.concatenate([part for _, part in rows(llm, tokens)])
    first, second = list(VARIANTS)[:2]
    nexts = np.asarray(tokens[1:])
    lines = []
    for name, ours in logp.items():
        perplexity = math.exp(-ours[np.arange(len(nexts)), nexts].astype(np.float64).mean())
        lines.append(
            [name, f"{perplexity:.3f}", *(f"{distance(logp[other], ours):.5f}" for other in (first, second))]
        )
    body = table(["attention", "perplexity", "KL from the first", "KL from the second"], lines)
    save(args.out, body, {"environment": environment(model), "n": args.n, "rows": lines})


def distance(p: NDArray[np.float32], q: NDArray[np.float32]) -> float:
    """Mean KL(p || q) of rows of log-probabilities, in nats."""
    return float((np.exp(p) * (p - q)).sum(-1).mean())


if __name__ == "__main__":
    main()
