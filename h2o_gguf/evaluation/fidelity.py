"""How closely an evicting cache follows the full one: teacher-forced, on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.logprobs import log_softmax
from h2o_gguf.protocols import Progress

if TYPE_CHECKING:
    from h2o_gguf.engine import Engine
    from h2o_gguf.llama import H2OLlama

__all__ = ["Fidelity", "FullCache", "bootstrap_ratio", "measure_fidelity", "read_full", "read_on", "rows"]

BOOTSTRAP_BLOCK = 64  # tokens resampled together: neighbouring losses are correlated
N_BLOCKS_MIN = 8  # of fewer tokens each in a short text: one block alone would have no width
BOOTSTRAP_N = 2000


@dataclass(frozen=True)
class FullCache:
    """What the full cache says.

    n_start : positions before it are read, not scored.
    logp : float32[n_scored, n_vocab] log-probabilities of the token after each scored position.
    nll : float64[n_scored] nats of the token that came.
    """

    n_start: int
    logp: NDArray[np.float32]
    nll: NDArray[np.float64]


@dataclass(frozen=True)
class Fidelity:
    """One policy at one budget against the full cache.

    n_sink, n_recent : entries it protects.
    perplexity : over n_scored tokens. ratio : perplexity over the full cache's; low, high : its 95 % interval
    (paired block bootstrap). kl : mean KL(full || policy) in nats. top1 : share of positions with the same
    most likely token. n_evicted : entries evicted per KV head. nll : float64[n_scored] nats of each token.
    """

    policy: str
    granularity: str
    budget: int
    n_sink: int
    n_recent: int
    n_scored: int
    perplexity: float
    ratio: float
    low: float
    high: float
    kl: float
    top1: float
    n_evicted: int
    nll: NDArray[np.float64] = field(repr=False, compare=False)

    def as_dict(self) -> dict[str, object]:
        """The fields, for JSON, but for nll."""
        return {name: value for name, value in asdict(self).items() if name != "nll"}


def read_on(engine: Engine, tokens: Sequence[int]) -> None:
    """Append tokens; where the engine recalls every N of those it generates, it does so here too.

    Each N-th token recalls alone: in a batch, those before it would see what it asked for.
    """
    every = engine.attic.options.every or 0 if engine.attic is not None else 0
    start = 0
    while start < len(tokens):
        n_before = every - 1 - engine.n_past % every if every else len(tokens)
        recalls = n_before == 0
        n = 1 if recalls else n_before
        engine.prefill(tokens[start : start + n], recall=recalls)
        start += n


def rows(
    llm: H2OLlama, tokens: Sequence[int], progress: Progress | None = None
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Read tokens from an empty cache; yield (position of the first row, log-probabilities) of each batch.

    tokens : read as they are, in batches of the model's n_batch; the budget is enforced before each.
    """
    engine = llm.engine
    engine.reset()
    got: list[tuple[int, NDArray[np.float32]]] = []
    engine.on_logits = lambda pos, logits: got.append((pos, log_softmax(logits)))
    try:
        n = engine.context.n_batch
        for start in range(0, len(tokens), n):
            read_on(engine, tokens[start : start + n])
            yield from got
            got.clear()
            if progress is not None:
                progress(min(start + n, len(tokens)), len(tokens))
    finally:
        engine.on_logits = None


def read_full(
    llm: H2OLlama, tokens: Sequence[int], n_start: int, progress: Progress | None = None
) -> FullCache:
    """Read tokens with a cache that holds them all.

    llm : without eviction. n_start : first scored position.
    """
    logp = np.concatenate(
        [
            part[max(0, n_start - pos) :]
            for pos, part in rows(llm, tokens, progress)
            if pos + len(part) > n_start
        ]
    )[:-1]
    nexts = np.asarray(tokens[n_start + 1 :])
    return FullCache(n_start, logp, -logp[np.arange(len(nexts)), nexts].astype(np.float64))


def measure_fidelity(
    llm: H2OLlama, tokens: Sequence[int], full: FullCache, progress: Progress | None = None
) -> Fidelity:
    """Read tokens with llm's policy and budget and compare with the full cache, from full.n_start on."""
    n_scored = len(full.nll)
    nll, kl, same = np.zeros(n_scored), np.zeros(n_scored), np.zeros(n_scored, bool)
    for pos, logp in rows(llm, tokens, progress):
        for i, row in enumerate(logp):
            k = pos + i - full.n_start
            if not 0 <= k < n_scored:
                continue
            reference = full.logp[k]
            nll[k] = -row[tokens[pos + i + 1]]
            kl[k] = float(np.dot(np.exp(reference), reference - row))
            same[k] = row.argmax() == reference.argmax()
    report = llm.engine.report()
    policy = llm.engine.policy
    low, high = bootstrap_ratio(nll, full.nll)
    return Fidelity(
        policy=report.policy,
        granularity=str(getattr(policy, "granularity", "")),
        budget=report.budget,
        n_sink=int(getattr(policy, "n_sink", 0)),
        n_recent=int(getattr(policy, "n_recent", 0)),
        n_scored=n_scored,
        perplexity=math.exp(nll.mean()),
        ratio=math.exp(nll.mean() - full.nll.mean()),
        low=low,
        high=high,
        kl=float(kl.mean()),
        top1=float(same.mean()),
        n_evicted=report.evicted,
        nll=nll,
    )


def bootstrap_ratio(
    nll: NDArray[np.float64], reference: NDArray[np.float64], seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % interval of exp(mean(nll - reference)): paired, in blocks of 64 neighbouring tokens.

    Fewer than 512 tokens are cut into eight blocks.
    """
    difference = nll - reference
    n_block = min(len(difference), max(N_BLOCKS_MIN, len(difference) // BOOTSTRAP_BLOCK))
    means = np.array([part.mean() for part in np.array_split(difference, n_block)])
    draws = np.random.default_rng(seed).integers(0, n_block, (BOOTSTRAP_N, n_block))
    low, high = np.quantile(means[draws].mean(-1), [0.025, 0.975])
    return math.exp(low), math.exp(high)
