"""One text read by several caches at once, block by block in turns: fidelity to the full cache, and speed.

Turns let a busy machine slow all of them alike, and one block of logits is all that is held.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from h2o_gguf.errors import OptionError
from h2o_gguf.evaluation.answering import Greedy
from h2o_gguf.evaluation.cells import Kept
from h2o_gguf.evaluation.fidelity import bootstrap_ratio, read_on
from h2o_gguf.evaluation.opening import WRITTEN, ModelFile
from h2o_gguf.evaluation.statistics import Interval
from h2o_gguf.evaluation.variants import Variant
from h2o_gguf.host_memory import available_bytes
from h2o_gguf.logprobs import log_softmax
from h2o_gguf.protocols import Progress

if TYPE_CHECKING:
    from h2o_gguf.llama import H2OLlama

__all__ = ["Reader", "Reading", "read_side_by_side"]

N_BUCKETS = 4
N_BURSTS = 4
BURST = WRITTEN // N_BURSTS  # tokens written in a turn: together what one eviction makes room for
MARGIN = 256 << 20  # bytes of a context beside its weights


@dataclass(frozen=True)
class Reader:
    """One cache that reads.  budget : entries per KV head."""

    variant: Variant
    kept: Kept
    budget: int


@dataclass(frozen=True)
class Reading:
    """One cache against the full one, on the same tokens.

    n_tokens : read. n_scored : of them the last ones, which are compared. perplexity : over those.
    ratio : perplexity over the full cache's, with a 95 % interval (paired, in blocks of 64 tokens).
    buckets : mean nats of a token, in equal parts of what is scored. kl : mean KL(full || this) in
    nats. top1 : share of positions with the same likeliest token. n_kept, kept_bytes, peak_bytes : as Outcome
    has them. read_rate, write_rate : tokens per second; writing with all tokens as history.
    """

    variant: Variant
    kept: Kept
    budget: int
    n_tokens: int
    n_scored: int
    perplexity: float
    ratio: Interval
    buckets: tuple[float, ...]
    kl: float
    top1: float
    n_kept: int
    kept_bytes: int
    peak_bytes: int
    read_rate: float
    write_rate: float

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self) | {"cache": self.variant.name}


class _Track:
    """A reader at work."""

    def __init__(self, reader: Reader, llm: H2OLlama, n_scored: int) -> None:
        self.reader, self.llm = reader, llm
        self.nll = np.zeros(n_scored)
        self.kl = np.zeros(n_scored)
        self.same = np.zeros(n_scored, np.bool_)
        self.read_s: list[float] = []
        self.write_s: list[float] = []
        self._rows: list[NDArray[np.float32]] = []
        self._writing: Generator[int, None, None] | None = None
        llm.engine.reset()

    def read(self, tokens: Sequence[int], *, is_scored: bool) -> NDArray[np.float32]:
        """Log-probabilities after each token: float32[n, n_vocab], of none unless is_scored."""
        self.llm.engine.on_logits = (lambda _, rows: self._rows.append(rows)) if is_scored else None
        started = time.perf_counter()
        read_on(self.llm.engine, tokens)
        self.read_s.append((time.perf_counter() - started) / len(tokens))
        rows = log_softmax(np.concatenate(self._rows)) if is_scored else np.empty((0, 0), np.float32)
        self._rows.clear()
        return rows

    def write(self, *, is_last: bool) -> None:
        """A turn of writing; the last one ends with the eviction of all that was written."""
        if self._writing is None:
            self.llm.engine.on_logits = None
            self._writing = self.llm.engine.generate(Greedy())
            next(self._writing)  # which is chosen: nothing is decoded before the second token
        started = time.perf_counter()
        n = sum(1 for _ in islice(self._writing, BURST))
        if is_last:
            self._writing.close()
        self.write_s.append((time.perf_counter() - started) / max(1, n))


def read_side_by_side(
    model: ModelFile,
    text: str,
    readers: Sequence[Reader],
    n_tokens: int,
    n_batch: int,
    progress: Progress | None = None,
) -> Iterator[Reading]:
    """Read the first n_tokens of a text with every reader, the first of them the full cache.

    The second half is scored. Where memory does not hold them all at once, the full cache reads again with
    each part of them, and what a part said is yielded before the next one reads. progress : tokens done and
    in all. Raises: what opening a model raises.
    """
    first, *others = readers
    n_beside = _n_open(model) - 1
    starts = range(0, max(1, len(others)), n_beside)
    n_before, n_all = 0, n_tokens * (len(others) + len(starts))
    for start in starts:
        part = [first, *others[start : start + n_beside]]

        def report(n: int, before: int = n_before) -> None:
            if progress is not None:
                progress(before + n, n_all)

        found = _measure(model, text, part, n_tokens, n_batch, report)
        n_before += n_tokens * len(part)
        yield from found if start == 0 else found[1:]


def _measure(
    model: ModelFile,
    text: str,
    readers: Sequence[Reader],
    n_tokens: int,
    n_batch: int,
    progress: Callable[[int], None],
) -> list[Reading]:
    """Of readers that are open at the same time.  progress : tokens done."""
    with ExitStack() as stack:
        tracks: list[_Track] = []
        tokens: list[int] = []
        for reader in readers:
            variant = reader.variant
            budget = n_tokens + WRITTEN if variant.is_full else reader.budget
            llm = stack.enter_context(model.open(variant, variant.make(budget), n_batch))
            tokens = tokens or _tokens(llm, text, n_tokens)
            tracks.append(_Track(reader, llm, len(tokens) - 1 - len(tokens) // 2))
        _read(tracks, tokens, n_batch, progress)
        reports = [track.llm.engine.report() for track in tracks]
        for turn in range(N_BURSTS):
            for track in tracks:
                track.write(is_last=turn == N_BURSTS - 1)
        full = tracks[0]
        return [
            _reading(track, full, report, len(tokens)) for track, report in zip(tracks, reports, strict=True)
        ]


def _n_open(model: ModelFile) -> int:
    """How many copies of the model fit into memory, 2 to 16; weights may be repacked, or on a GPU."""
    room = available_bytes()
    if room is None or model.n_gpu_layers:
        return 2
    return max(2, min(16, room // (2 * os.stat(model.path).st_size + MARGIN)))


def _tokens(llm: H2OLlama, text: str, n: int) -> list[int]:
    tokens = llm.tokenize(text.encode())[:n]
    if len(tokens) < n:
        raise OptionError(
            f"the text has {len(tokens)} tokens, and {n} shall be read: take a longer text, a shorter "
            "length, or leave the task fidelity out",
            "text",
        )
    return list(tokens)


def _read(
    tracks: Sequence[_Track], tokens: Sequence[int], n_batch: int, progress: Callable[[int], None]
) -> None:
    first = len(tokens) // 2  # scored position
    for start in range(0, len(tokens), n_batch):
        block = tokens[start : start + n_batch]
        skip = max(0, first - start)
        nexts = np.asarray(tokens[start + skip + 1 : start + len(block) + 1])
        at = slice(start + skip - first, start + skip - first + len(nexts))
        reference = np.empty((0, 0), np.float32)
        for i, track in enumerate(tracks):
            rows = track.read(block, is_scored=skip < len(block))[skip:][: len(nexts)]
            if i == 0:
                reference = rows
            if len(nexts):
                track.nll[at] = -rows[np.arange(len(nexts)), nexts]
                track.kl[at] = (np.exp(reference) * (reference - rows)).sum(-1)
                track.same[at] = rows.argmax(-1) == reference.argmax(-1)
            progress(start * len(tracks) + len(block) * (i + 1))


def _reading(track: _Track, full: _Track, report: Any, n_tokens: int) -> Reading:
    low, high = bootstrap_ratio(track.nll, full.nll)
    ratio = float(np.exp(track.nll.mean() - full.nll.mean()))
    return Reading(
        variant=track.reader.variant,
        kept=track.reader.kept,
        budget=track.reader.budget,
        n_tokens=n_tokens,
        n_scored=len(track.nll),
        perplexity=float(np.exp(track.nll.mean())),
        ratio=Interval(ratio, low, high, len(track.nll)),
        buckets=tuple(float(part.mean()) for part in np.array_split(track.nll, N_BUCKETS)),
        kl=float(track.kl.mean()),
        top1=float(track.same.mean()),
        n_kept=report.used,
        kept_bytes=report.used_bytes,
        peak_bytes=report.bytes,
        read_rate=1 / median(track.read_s),
        write_rate=1 / float(np.mean(track.write_s)),
    )
