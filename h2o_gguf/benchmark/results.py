"""What a comparison found.  Rates are tokens or bytes per second."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

__all__ = ["Report", "Row", "ScoresCost", "Section", "Spread"]


@dataclass(frozen=True)
class Spread:
    """Smallest, quartiles and largest of n values."""

    n: int
    min: float
    q1: float
    median: float
    q3: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        array = np.array(list(values), dtype=np.float64)
        return cls(len(array), *(float(q) for q in np.quantile(array, (0, 0.25, 0.5, 0.75, 1))))


@dataclass(frozen=True)
class Row:
    """One way to run a model, at one length of history.

    variant : what is run. budget : entries per KV head after an eviction, None: everything is kept.
    n_entries : entries per KV head that decoding attends to, on average. n_cells : allocated.
    n_ubatch : tokens computed at once while reading.
    decode_rate : of writing with this history, evictions included. decode_speedup : over the first row.
    prefill_rate, prefill_speedup : of reading the history. prefill_s : seconds of each round of 512 tokens.
    first_token_s : seconds from the prompt, the history, to the first token.
    short_s : seconds of a token after 64 tokens. evict_s : seconds of an eviction, None without.
    kv_bytes : allocated. rss_bytes : most of the process, weights included.
    attention_rate : bytes of K and V per second, of the entries beyond those after 64 tokens and of the time
        beyond that of a token then; None where there is too little of either.
    bandwidth_share : that rate over the read bandwidth of the same repetition.
    """

    variant: str
    budget: int | None
    n_entries: int
    n_cells: int
    n_ubatch: int
    decode_rate: Spread
    decode_speedup: Spread
    prefill_rate: Spread
    prefill_speedup: Spread
    prefill_s: tuple[float, ...]
    first_token_s: Spread
    short_s: float
    evict_s: float | None
    kv_bytes: int
    rss_bytes: int
    attention_rate: Spread | None
    bandwidth_share: Spread | None


@dataclass(frozen=True)
class ScoresCost:
    """Time with scores over time without, in the same cells.

    decode : without evictions. prefill : with them.
    """

    decode: Spread
    prefill: Spread


@dataclass(frozen=True)
class Section:
    """All rows of one history, the one to compare with first.

    history : tokens. read_bandwidth : bytes per second that as many threads read from memory.
    scores_cost : None where no variant goes without scores.
    """

    history: int
    read_bandwidth: Spread
    rows: tuple[Row, ...]
    scores_cost: ScoresCost | None = None


@dataclass(frozen=True)
class Report:
    """A whole comparison.

    environment : machine, versions, model. settings : what was asked for. systems : what each variant's
    llama.cpp says of itself.
    """

    environment: dict[str, Any]
    settings: dict[str, Any]
    systems: dict[str, str]
    sections: tuple[Section, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return asdict(self)
