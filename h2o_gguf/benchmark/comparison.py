"""Runs variants side by side, turn by turn, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

from h2o_gguf.benchmark.machine import ReadBandwidth, environment
from h2o_gguf.benchmark.process import Worker, WorkerProcess
from h2o_gguf.benchmark.results import Report, Row, ScoresCost, Section, Spread
from h2o_gguf.benchmark.variants import (
    BURST,
    EVICTIONS,
    SHORT,
    Plan,
    Settings,
    fitting_histories,
    make_plan,
    require_memory,
    variants,
)
from h2o_gguf.errors import OptionError
from h2o_gguf.models import ModelShape, memory_bytes, read_shape
from h2o_gguf.protocols import Progress

__all__ = ["Samples", "compare", "make_section", "measure"]

ROUND = 512  # tokens read in one turn
READ_TOKENS = 4096  # a history is read as often as fits into these, and at least once
# Less attention cannot be told from noise: entries beyond those after 64 tokens, share of the time then.
LEAST_ENTRIES, LEAST_SHARE = 256, 0.1

Start = Callable[[str, dict[str, Any]], AbstractContextManager[Worker]]


@dataclass
class Samples:
    """What one worker was measured at, in seconds.

    short : of a token after 64 tokens of history, one for each repetition. rounds : of each pass over the
    history, of each round. tokens : of a token with the whole history. evictions : of each.
    n_short, n_entries : entries attended to by short and by tokens. facts : the worker's last.
    """

    plan: Plan
    short: list[float] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    evictions: list[float] = field(default_factory=list)
    n_short: int = 0
    n_entries: int = 0
    facts: dict[str, Any] = field(default_factory=dict)

    def decode_s(self) -> list[float]:
        """Seconds of a token in each repetition, its share of an eviction included."""
        share = median(self.evictions) / self.plan.block if self.evictions else 0.0
        return [seconds + share for seconds in self.tokens]

    def prefill_s(self) -> list[float]:
        """Seconds of each pass over the history."""
        return [sum(rounds) for rounds in self.rounds]


def compare(
    model: str,
    settings: Settings,
    *,
    progress: Progress | None = None,
    start: Start = WorkerProcess,
    bandwidth: Callable[[int], ReadBandwidth] = ReadBandwidth,
) -> Report:
    """Measure every variant at every history, n workers at a time.

    model : path of a GGUF file. progress : called with tokens done and in all.
    start, bandwidth : make a worker, and what measures the machine; for tests.

    Raises: ModelFileError, UnsupportedModelError, OptionError, BudgetError, OutOfMemoryError before anything
        is run; NativeError, a worker failed.
    """
    shape = read_shape(model)
    about = environment(model)
    histories = fitting_histories(settings, shape)
    compared = variants(settings)
    plans = {n: [make_plan(variant, n, model, shape, settings) for variant in compared] for n in histories}
    for n, row in plans.items():
        require_memory(n, row)
    n_threads = int(plans[histories[0]][0].job["n_threads"])
    n_total = sum(_n_tokens(n, plan, settings.repeats) for n, row in plans.items() for plan in row)
    n_done = 0

    def step(n: int) -> None:
        nonlocal n_done
        n_done += n
        if progress is not None:
            progress(n_done, n_total)

    sections: list[Section] = []
    systems: dict[str, str] = {}
    with closing(bandwidth(n_threads)) as read_bandwidth:
        for n, row in plans.items():
            with ExitStack() as stack:
                workers = {p.variant.name: stack.enter_context(start(p.variant.name, p.job)) for p in row}
                systems |= {name: worker.facts["system"].strip() for name, worker in workers.items()}
                _check_versions(settings, workers)
                samples, rates = measure(n, row, workers, settings.repeats, read_bandwidth, step)
            sections.append(make_section(n, samples, rates, shape, settings))
    settings = replace(settings, histories=histories, n_threads=n_threads)
    return Report(about, _plain(settings), systems, tuple(sections))


def measure(
    n: int,
    plans: Sequence[Plan],
    workers: dict[str, Worker],
    repeats: int,
    read_bandwidth: Callable[[], float],
    step: Callable[[int], None] = lambda n: None,
    *,
    is_filled: bool = False,
) -> tuple[list[Samples], list[float]]:
    """Measure one history of n tokens; return the samples of each plan and the machine's read bandwidths.

    is_filled : caches are filled with copies, and no history is read: there are no rounds.
    """
    every = [Samples(plan) for plan in plans]
    bounded = [s for s in every if s.plan.budget is not None]

    def ask(samples: Samples, verb: str, *arguments: int) -> dict[str, Any]:
        answer = workers[samples.plan.variant.name].ask(verb, *arguments)
        step(sum(arguments))
        return answer

    def write(samples: Samples) -> tuple[float, int]:
        answer = ask(samples, "write", BURST)
        # The first token finds the caches full of another worker's data.
        return median(answer["seconds"][1:]), answer["entries"]

    for samples in every:
        ask(samples, "read", SHORT)
    for i in range(repeats):
        for samples in _turns(every, i):
            seconds, samples.n_short = write(samples)
            samples.short.append(seconds)

    for samples in every if is_filled else ():
        ask(samples, "reset")
        ask(samples, "fill", n)
    for i in range(0 if is_filled else _n_passes(n, repeats)):
        for samples in every:
            ask(samples, "reset")
            samples.rounds.append([])
        for j, first in enumerate(range(0, n, ROUND)):
            for samples in _turns(every, i + j):
                samples.rounds[i].append(ask(samples, "read", min(ROUND, n - first))["seconds"])

    for samples in bounded:  # to the middle between two evictions
        ask(samples, "settle")
        ask(samples, "read", samples.plan.block // 2)
    rates: list[float] = []
    for i in range(repeats):
        for turn in _turns([*every, None], i):
            if turn is None:
                rates.append(read_bandwidth())
            else:
                seconds, turn.n_entries = write(turn)
                turn.tokens.append(seconds)
    for i in range(EVICTIONS):
        for samples in _turns(bounded, i):
            ask(samples, "read", samples.plan.block)
            samples.evictions.append(ask(samples, "settle")["seconds"])
    for samples in every:
        samples.facts = ask(samples, "facts")
    return every, rates


def make_section(
    n: int, every: Sequence[Samples], rates: Sequence[float], shape: ModelShape, settings: Settings
) -> Section:
    """What the samples of a history of n tokens say.  The first is the one to compare with."""
    rows = [_make_row(n, samples, every[0], rates, shape, settings) for samples in every]
    return Section(n, Spread.of(rates), tuple(rows), _scores_cost(every))


def _make_row(
    n: int, samples: Samples, first: Samples, rates: Sequence[float], shape: ModelShape, settings: Settings
) -> Row:
    plan, short_s = samples.plan, median(samples.short)
    decode_s, prefill_s = samples.decode_s(), samples.prefill_s()
    n_more = samples.n_entries - samples.n_short
    attention_s = [seconds - short_s for seconds in samples.tokens]
    attention = None
    if n_more >= LEAST_ENTRIES and min(attention_s) > LEAST_SHARE * short_s:
        n_bytes = _attended(samples.n_entries, shape, settings) - _attended(samples.n_short, shape, settings)
        attention = [n_bytes / seconds for seconds in attention_s]
    return Row(
        variant=plan.variant.name,
        budget=plan.budget,
        n_entries=samples.n_entries,
        n_cells=plan.n_cells,
        n_ubatch=plan.n_ubatch,
        decode_rate=Spread.of(1 / seconds for seconds in decode_s),
        decode_speedup=_ratio(first.decode_s(), decode_s),
        prefill_rate=Spread.of(n / seconds for seconds in prefill_s),
        prefill_speedup=_ratio(first.prefill_s(), prefill_s),
        prefill_s=tuple(median(seconds) for seconds in zip(*samples.rounds, strict=True)),
        first_token_s=Spread.of(prefill_s),
        short_s=short_s,
        evict_s=median(samples.evictions) if samples.evictions else None,
        kv_bytes=plan.kv_bytes,
        rss_bytes=int(samples.facts["rss"]),
        attention_rate=Spread.of(attention) if attention else None,
        bandwidth_share=_ratio(attention, rates) if attention else None,
    )


def _scores_cost(every: Sequence[Samples]) -> ScoresCost | None:
    for off in every:
        if not off.plan.variant.is_scored:
            scored = replace(off.plan.variant, name="", is_scored=True)
            on = next(s for s in every if replace(s.plan.variant, name="") == scored)
            return ScoresCost(_ratio(on.tokens, off.tokens), _ratio(on.prefill_s(), off.prefill_s()))
    return None


def _ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """The spread of the quotients of each repetition."""
    return Spread.of(a / b for a, b in zip(over, under, strict=True))


def _attended(n_entries: int, shape: ModelShape, settings: Settings) -> float:
    """Bytes of K and V that a token attends to in all layers; windowed layers see their window."""
    one = memory_bytes(shape, 1, 1, settings.type_k, settings.type_v)
    in_window = min(n_entries, shape.n_swa) * one.window / max(one.n_cells_window, 1)
    return n_entries * one.full / one.n_cells + in_window


def _turns(items: Sequence[Any], i: int) -> list[Any]:
    """The items, another one first in each repetition i."""
    k = i % len(items) if items else 0
    return [*items[k:], *items[:k]]


def _n_passes(n: int, repeats: int) -> int:
    return max(1, min(repeats, READ_TOKENS // n))


def _n_tokens(n: int, plan: Plan, repeats: int) -> int:
    """Tokens that `measure` has one worker decode."""
    n_evicted = plan.block // 2 + EVICTIONS * plan.block if plan.budget is not None else 0
    return SHORT + 2 * repeats * BURST + _n_passes(n, repeats) * n + n_evicted


def _check_versions(settings: Settings, workers: dict[str, Worker]) -> None:
    found = {name: str(worker.facts["version"]) for name, worker in workers.items()}
    if len(set(found.values())) > 1:
        stock, ours = list(found.values())[:2]
        raise OptionError(
            f"{settings.stock} is another llama.cpp than this runtime's (ggml {stock}, here {ours}): "
            "build it from the same source (`make bench`)",
            "stock",
        )


def _plain(settings: Settings) -> dict[str, Any]:
    """The settings as JSON has them, without a path of this machine."""
    return asdict(settings) | {"stock": settings.stock is not None}
