"""What the newest tokens attend to, more of it in the lower layers."""

from __future__ import annotations

from h2o_gguf.policies.layers import LayerBudgets
from h2o_gguf.policies.observed import Pooling
from h2o_gguf.policies.selection import Granularity
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.policies.splits import N_CLASSES, Pyramid

__all__ = ["KEEPS", "NAME", "pyramidkv"]

NAME = "pyramidkv"
KEEPS = "the newest and those they attend to, more in lower layers"


def pyramidkv(
    budget: int,
    n_sink: int = 0,
    n_recent: int = AUTO,
    granularity: Granularity = "head",
    n_observed: int = 32,
    kernel: int = 7,
    pooling: Pooling = "max",
    beta: float = 20,
    n_classes: int = N_CLASSES,
) -> LayerBudgets:
    """Return PyramidKV: SnapKV, with budgets that fall from the first layer to the last.

    budget : entries per KV head, the mean over the layers, >= 1. beta, n_classes : see Pyramid. Others : see
    SnapKV; what it protects in every layer, the paper's window w, is taken out before the rest is split.

    Source: arXiv 2406.02069.
    """
    knobs = {
        "n_sink": n_sink,
        "n_recent": n_recent,
        "granularity": granularity,
        "n_observed": n_observed,
        "kernel": kernel,
        "pooling": pooling,
    }
    return LayerBudgets(Pyramid(budget, beta, n_classes), "snapkv", knobs, title=NAME)
