"""Means with intervals, and what a number of samples can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Interval", "bootstrap", "hidden_loss", "samples_needed"]

N_DRAWS = 4000
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval.  n : values behind it."""

    mean: float
    low: float
    high: float
    n: int


def bootstrap(strata: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """The mean of the means of several groups of values, each drawn from on its own; percentiles.

    strata : one group or more, each of one value or more.
    """
    rng = np.random.default_rng(seed)
    groups = [np.asarray(group, np.float64) for group in strata]
    means = np.mean([g[rng.integers(0, len(g), (N_DRAWS, len(g)))].mean(-1) for g in groups], axis=0)
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(
        float(np.mean([g.mean() for g in groups])), float(low), float(high), sum(len(g) for g in groups)
    )


def hidden_loss(n: int) -> float:
    """The largest share of wrong answers that n samples without one miss in 5 % of all cases: about 3 / n.

    A bootstrap over n equal values has no width, however small n is; this says what it hides.
    """
    return float(1 - (1 - LEVEL) ** (1 / n)) if n else 1.0


def samples_needed(loss: float) -> int:
    """Samples without a wrong answer that rule out a larger share of them than loss, above 0 and below 1."""
    return int(np.ceil(np.log(1 - LEVEL) / np.log1p(-loss)))
