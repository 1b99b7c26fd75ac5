"""How far our attention is from llama.cpp's, beside how far llama.cpp's own variants are from each other.

    python scripts/attention.py [MODEL] [-n 640] [--types f32 f16 ...] [--out docs/figures/attention]

Nothing is evicted. The same tokens are read by llama.cpp with and without flash attention and by our kernels;
then, for each type of K and V, by llama.cpp with flash attention and by our fastest kernel.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from report import arguments, environment, model_file, save, table

from h2o_gguf import H2OLlama
from h2o_gguf.evaluation import rows
from h2o_gguf.evaluation.texts import prose
from h2o_gguf.models.memory import CACHE_TYPES

VARIANTS = {
    "llama.cpp, flash attention": {"policy": "none"},
    "llama.cpp, without": {"policy": "none", "flash_attn": False},
    "ours, composed": {"attention": "composed"},
    "ours, fused": {"attention": "fused"},
    "ours, reference": {"attention": "reference"},
}


STOCK, OURS = VARIANTS["llama.cpp, flash attention"], VARIANTS["ours, fused"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="a GGUF file; the default model if left out")
    parser.add_argument("-n", type=int, default=640, help="tokens read")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--types", nargs="+", default=CACHE_TYPES, choices=CACHE_TYPES, help="of K and V")
    parser.add_argument("--threads", type=int, help="default: the physical cores")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = model_file(args.model)

    def read(**options: Any) -> tuple[list[int], NDArray[np.float32]]:
        size = {"n_ctx": args.n + args.batch} if "policy" in options else {"kv_budget": args.n + args.batch}
        with H2OLlama(model, n_batch=args.batch, n_threads=args.threads, **size, **options) as llm:
            tokens = llm.tokenize(prose().encode())[: args.n]
            return tokens[1:], np.concatenate([part for _, part in rows(llm, tokens)])

    logp = {}
    for name, options in VARIANTS.items():
        nexts, logp[name] = read(**options)
    first, second = list(VARIANTS)[:2]
    variants = [
        [name, f"{perplexity(p, nexts):.3f}", *(f"{distance(logp[q], p):.5f}" for q in (first, second))]
        for name, p in logp.items()
    ]
    types = []
    for name in args.types:
        (_, stock), (_, ours) = (read(type_k=name, type_v=name, **options) for options in (STOCK, OURS))
        figures = perplexity(stock, nexts), perplexity(ours, nexts)
        types.append([name, *(f"{figure:.3f}" for figure in figures), f"{distance(stock, ours):.5f}"])
    heads = (
        ["attention", "perplexity", "KL from the first", "KL from the second"],
        ["K and V", "perplexity, llama.cpp", "perplexity, ours", "KL from llama.cpp"],
    )
    body = "\n\n".join(table(head, lines) for head, lines in zip(heads, (variants, types), strict=True))
    facts = {"environment": environment(model), "arguments": arguments(args)}
    save(args.out, body, {**facts, "rows": variants, "types": types})


def perplexity(logp: NDArray[np.float32], nexts: list[int]) -> float:
    """Perplexity of the tokens that follow each row of log-probabilities; the last has none."""
    return math.exp(-logp[np.arange(len(nexts)), nexts].astype(np.float64).mean())


def distance(p: NDArray[np.float32], q: NDArray[np.float32]) -> float:
    """Mean KL(p || q) of rows of log-probabilities, in nats."""
    return float((np.exp(p) * (p - q)).sum(-1).mean())


if __name__ == "__main__":
    main()
