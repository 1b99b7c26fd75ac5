"""What queries still to come should attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.observation import Observation, Rotation
from h2o_gguf.policies.knobs import check_number, check_whole, settle
from h2o_gguf.policies.observed import by_layer
from h2o_gguf.policies.selection import Cells, Granularity, select_lowest
from h2o_gguf.policies.shares import AUTO
from h2o_gguf.view import CacheView

__all__ = ["ExpectedAttention"]

Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class ExpectedAttention:
    """Keep the entries the next queries should attend to, times the length of their values.

    The newest queries, without their rotation, are taken for draws from a normal distribution, one per query
    head. A future query is another draw, rotated to one of the next n_future positions; the logarithm of its
    expected unnormalised attention to key k is k m / sqrt(d) + k S k / (2 d), where m is the mean and S the
    covariance of the draws, rotated and averaged over those positions.

    budget : entries per KV head, >= 1. n_sink : protected entries, which are no evidence either. n_recent :
        protected entries; -1 is 32, at most half of the rest. n_observed : queries, >= 1.
    n_future : positions, >= 1. epsilon : share every entry gets, >= 0.

    Source: arXiv 2510.00636; the covariance is rotated, then averaged, where the paper rotates
    it by the mean rotation.
    """

    budget: int
    n_sink: int = 4
    n_recent: int = AUTO
    granularity: Granularity = "head"
    n_observed: int = 128
    n_future: int = 512
    epsilon: float = 0.01

    name: ClassVar[str] = "expected-attention"
    keeps: ClassVar[str] = "those the next tokens should attend to"
    needs_scores: ClassVar[bool] = False
    n_trace: ClassVar[int] = 0
    decay: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        settle(self, n_recent_most=32)
        check_whole("n_future", self.n_future, 1)
        check_number("epsilon", self.epsilon, 0.0)

    def victims(self, view: CacheView, n: int) -> Cells:
        """Return the n with the least expected attention per KV head: int32[n_layer, n_head_kv, n]."""

        def score(row: int) -> Floats:
            logits = expected_logits(view, row, self.n_sink, self.n_future)
            counts = (view.pos[row] >= self.n_sink)[:, None, :]
            logits = np.where(counts, logits, -np.inf)
            peak = logits.max(-1, keepdims=True)
            mass = np.exp(logits - np.where(np.isfinite(peak), peak, 0))
            share = mass / np.maximum(mass.sum(-1, keepdims=True), np.finfo(mass.dtype).tiny)
            lengths: Floats = np.linalg.norm(view.seen.values(row), axis=-1)
            return np.asarray((share.mean(1) + self.epsilon) * lengths)

        scores = by_layer(view, score)
        return select_lowest(view, scores, view.evictable(self.n_sink, self.n_recent), n, self.granularity)


def expected_logits(view: CacheView, row: int, n_sink: int, n_future: int) -> Floats:
    """Return the log of a future query's expected unnormalised attention: [n_head_kv, n_group, n_cells]."""
    seen = view.seen
    queries, is_evidence = seen.queries(row), seen.query_pos >= n_sink
    age = view.n_past - 1 - seen.query_pos[is_evidence]
    mean, covariance = _future(queries[:, :, is_evidence], age, seen.rotation(row), n_future)
    keys = np.where(view.pos[row, :, :, None] >= 0, seen.keys(row), 0)[:, None]
    scale = _scale(seen, row, queries[:, :, :1])
    slope = scale * mean[:, :, None] + keys @ (scale**2 / 2 * covariance)
    logits: Floats = np.einsum("hgcd,hcd->hgc", slope, keys[:, 0])
    return logits


def _scale(seen: Observation, row: int, query: Floats) -> float:
    """What logits multiply a product of query and key by: 1 / sqrt(d), unless queries are scaled before."""
    n_head_kv, n_group, _, head_dim = query.shape
    step = 2.0**-10  # small, so that a cap of the logits is not felt
    query = np.zeros((n_head_kv, n_group, 1, head_dim), query.dtype)
    query[..., 0] = step
    return float(seen.logits(row, query, query[:, 0])[0, 0, 0, 0]) / step**2


def _future(
    queries: Floats, age: NDArray[np.integer[Any]], rotation: Rotation | None, n_future: int
) -> tuple[Floats, Floats]:
    """Return mean and mean covariance of queries rotated to the next n_future positions.

    queries : [n_head_kv, n_group, n_query, head_dim], as they were `age` positions ago.
    Returns: [n_head_kv, n_group, head_dim] and [n_head_kv, n_group, head_dim, head_dim].
    """
    n_query, head_dim = queries.shape[2:]
    if not n_query:
        shape = (*queries.shape[:2], head_dim)
        return np.zeros(shape, queries.dtype), np.zeros((*shape, head_dim), queries.dtype)
    first, second, angle = _pairs(rotation, head_dim)
    # A pair of elements is a complex number, and a rotation multiplies it; an element without a partner has
    # an angle of 0 and an imaginary part of 0.
    draws = _complex(queries, first, second) * np.exp(1j * np.outer(age, angle)).astype(
        np.result_type(queries.dtype, np.complex64)
    )
    mean = draws.mean(2)
    spread = draws - mean[:, :, None]
    across = spread.swapaxes(2, 3)
    # E[x conj(y)] and E[x y] say all of a covariance; rotated, each is multiplied by a mean of turns.
    straight = across @ spread.conj() / n_query * _mean_turn(np.subtract.outer(angle, angle), n_future)
    twisted = across @ spread / n_query * _mean_turn(np.add.outer(angle, angle), n_future)
    covariance = np.empty((*queries.shape[:2], head_dim, head_dim), queries.dtype)
    paired = second >= 0
    rows, columns = first[:, None], first[None, :]
    covariance[..., rows, columns] = (straight + twisted).real / 2
    if paired.any():
        seconds = second[paired]
        covariance[..., seconds[:, None], columns] = (straight + twisted).imag[..., paired, :] / 2
        covariance[..., rows, seconds[None, :]] = (twisted - straight).imag[..., :, paired] / 2
        both = (straight - twisted).real[..., paired, :][..., paired] / 2
        covariance[..., seconds[:, None], seconds[None, :]] = both
    mean *= _mean_turn(angle, n_future)
    return _real(mean, first, second, head_dim), covariance


def _mean_turn(angle: NDArray[np.float64], n: int) -> NDArray[np.complex128]:
    """Return the mean of exp(i j angle) over j = 1 .. n, as Dirichlet's kernel."""
    half = angle / 2
    size = np.divide(np.sin(n * half), n * np.sin(half), out=np.ones_like(half), where=np.sin(half) != 0)
    return np.asarray(size * np.exp(1j * (n + 1) * half))


def _pairs(rotation: Rotation | None, head_dim: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """First and second element and angle of every pair; a second of -1 and an angle of 0 for single ones."""
    if rotation is None:
        return np.arange(head_dim), np.full(head_dim, -1), np.zeros(head_dim)
    single = np.setdiff1d(np.arange(head_dim), np.concatenate([rotation.first, rotation.second]))
    return (
        np.concatenate([rotation.first, single]),
        np.concatenate([rotation.second, np.full(single.size, -1)]),
        np.concatenate([rotation.angle, np.zeros(single.size)]),
    )


def _complex(vectors: Floats, first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    paired = second >= 0
    numbers = np.empty((*vectors.shape[:-1], first.size), np.result_type(vectors.dtype, np.complex64))
    numbers.real = vectors[..., first]
    numbers.imag = 0
    numbers.imag[..., paired] = vectors[..., second[paired]]
    return numbers


def _real(numbers: NDArray[Any], first: NDArray[Any], second: NDArray[Any], head_dim: int) -> Floats:
    paired = second >= 0
    vectors = np.zeros((*numbers.shape[:-1], head_dim), numbers.real.dtype)
    vectors[..., first] = numbers.real
    vectors[..., second[paired]] = numbers.imag[..., paired]
    return vectors
