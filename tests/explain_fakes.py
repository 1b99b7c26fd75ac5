"""An explanation of a text nobody read, with numbers drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.explain import HELD, Explanation


def explanation(texts: Sequence[str], n_answer: int = 4, *, seed: int = 0, **changes: Any) -> Explanation:
    """Layers 1, 3 and 5 with two KV heads; something left every 16 tokens.  The last token was not read."""
    rng = np.random.default_rng(seed)
    n_past = len(texts) - 1
    shape = (3, 2, n_past)
    left = rng.integers(1, max(2, n_past // 16), shape, dtype=np.int32) * 16
    left = np.where((left <= np.arange(n_past)) | (rng.random(shape) < 0.4), HELD, left).astype(np.int32)
    left[..., : n_past // 10] = HELD
    left[..., n_past // 10 : n_past // 5] = min(n_past, 16 * (n_past // 16))
    shares = rng.random((2, n_answer, n_past), np.float32) ** 8
    by_head = rng.random((2, *shape), np.float32) ** 8
    by_head /= by_head.sum(-1, keepdims=True)
    facts: dict[str, Any] = dict(
        model="tiny", policy="h2o+", budget=64, n_sink=4, n_recent=8, pins=((6, 9),), layer_ids=(1, 3, 5),
        has_scores=True, texts=tuple(texts), n_past=n_past, n_prompt=len(texts) - n_answer, left=left,
        heavy=(left == HELD) & (rng.random(shape) < 0.1), kept=shares[0] / shares[0].sum(-1, keepdims=True),
        missed=shares[1] / shares[1].sum(-1, keepdims=True) / 5, kept_by_head=by_head[0],
        missed_by_head=by_head[1] / 5,
    )  # fmt: skip
    return Explanation(**(facts | changes))


def gaps_of(left: NDArray[np.int32], *, seed: int = 0) -> NDArray[np.int32]:
    """Two absences of some entries, and one of others, before they left for good, if they did."""
    rng = np.random.default_rng(seed)
    rows = []
    for row, head, pos in np.argwhere(rng.random(left.shape) < 0.15):
        n_last = min(int(left[row, head, pos]), left.shape[-1])
        times = np.sort(rng.integers(pos + 1, n_last + 1, 4)) if n_last > pos else []
        rows += [(row, head, pos, a, b) for a, b in zip(times[::2], times[1::2], strict=True)]
    return np.array(rows[1:], np.int32)  # of the first entry only the second
