"""The engine's books, on a context that is only books."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from h2o_gguf.cancel import CancelToken
from h2o_gguf.engine import DECODE_ABORTED, DECODE_NO_ROOM, DECODE_NO_VICTIMS, Engine
from h2o_gguf.errors import (
    BudgetError,
    CacheFullError,
    Cancelled,
    ClosedError,
    ContextOverflowError,
    NativeError,
    OptionError,
    PolicyError,
)
from h2o_gguf.policies import as_policy, make

N_VOCAB = 50
CONTROL = 0


class Vocab:
    """Token i spells one letter; 0 is a control token; 40 + i spells letters i and i + 1."""

    n_tokens = N_VOCAB

    def check(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < N_VOCAB:
                raise OptionError(f"token {token}", "prompt")

    def text_piece(self, token: int) -> bytes | None:
        if token == CONTROL:
            return None
        return bytes([64 + token - 40, 65 + token - 40]) if token > 40 else bytes([64 + token])


@dataclass
class FakeContext:
    """Holds what a llama.cpp context would hold; the logits say which tokens it has seen."""

    n_batch: int = 4
    n_cells: int = 1000
    n_ctx_train: int = 1000
    removal_is_exact: Callable[[int], bool] = lambda pos: True
    seen: list[int] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)  # what the next decodes return
    before: Callable[[], None] = lambda: None
    vocab: Any = field(default_factory=Vocab)

    def decode(self, tokens: Sequence[int], pos: int, *, all_logits: bool, cancel: CancelToken | None) -> int:
        assert len(tokens) <= self.n_batch and pos == len(self.seen)
        self.before()
        code = self.codes.pop(0) if self.codes else 0
        if cancel is not None and cancel.cancelled:
            code = DECODE_ABORTED
        if code == 0:
            self.seen += tokens
            self.batches.append(list(tokens))
        return code

    def logits(self, n_rows: int) -> NDArray[np.float32]:
        rows = np.zeros((n_rows, N_VOCAB), np.float32)
        for i in range(n_rows):
            rows[i, self.expected(self.seen[: len(self.seen) - n_rows + 1 + i])] = 1
        return rows

    @staticmethod
    def expected(tokens: Sequence[int]) -> int:
        return 1 + sum((i + 1) * token for i, token in enumerate(tokens)) % 39

    def n_past(self) -> int:
        return len(self.seen)

    def remove_from(self, pos: int) -> bool:
        if not self.removal_is_exact(pos):
            return False
        del self.seen[pos:]
        return True

    def clear(self) -> None:
        self.seen.clear()

    def close(self) -> None:
        pass


class FakeCache:
    """Counts entries; asks its policy as the native cache does."""

    kv_bytes = 4096
    n_rebases = 0

    def __init__(self, context: FakeContext, policy: Any) -> None:
        self.context, self.budget, self.n_recent = context, policy.budget, policy.n_recent
        self.fn: Any = None
        self.n_evicted = 0
        self.is_closed = False

    def set_policy(self, fn: Any) -> None:
        self.fn = fn

    def used(self) -> int:
        return len(self.context.seen) - self.n_evicted

    @property
    def used_bytes(self) -> int:
        return 64 * self.used()

    def rollback_min(self) -> int:
        return max(0, len(self.context.seen) - self.n_recent) if self.n_evicted else 0

    def make_room(self, n_keep: int) -> int:
        n = self.used() - n_keep
        if n <= 0:
            return 0
        pos = np.full((1, 1, 64), -1, np.int32)
        pos[0, 0, : self.used()] = np.arange(self.n_evicted, len(self.context.seen))
        scores = np.zeros(pos.shape, np.float32)
        n_past = len(self.context.seen)
        self.fn(
            SimpleNamespace(
                scores=scores, pos=pos, n_past=n_past, n_used=self.used(), layer_ids=(0,), observation=None
            ),
            n,
        )
        self.n_evicted += n
        return n

    def save(self) -> bytes:
        return b""

    def load(self, data: bytes) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class Greedy:
    def __init__(self) -> None:
        self.accepted: list[int] = []

    def sample(self, logits: NDArray[np.float32], tokens: NDArray[np.intc]) -> int | None:
        return int(logits.argmax())

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def engine(n_ctx: int = 100, **knobs: Any) -> tuple[Engine, FakeContext]:
    context = FakeContext(**knobs)
    return Engine(context, n_ctx=n_ctx), context


def evicting(budget: int = 20, policy: Any = None, **knobs: Any) -> tuple[Engine, FakeContext, FakeCache]:
    context = FakeContext(**knobs)
    policy = policy or make("streaming", budget=budget, n_sink=0, n_recent=8)
    cache = FakeCache(context, policy)
    return Engine(context, None, policy, cache=cache), context, cache


def logits_are_right(e: Engine, context: FakeContext) -> bool:
    return e.logits is not None and int(e.logits.argmax()) == context.expected(e.tokens)


def take(e: Engine, n: int, **kwargs: Any) -> list[int]:
    return list(e.generate(Greedy(), max_tokens=n, **kwargs))


# -- prefill ---------------------------------------------------------------------------------------------


def test_a_prompt_is_read_in_batches_and_ends_with_its_logits() -> None:
    e, context = engine()
    seen: list[tuple[int, int]] = []
    e.prefill(list(range(1, 11)), progress=lambda done, total: seen.append((done, total)))
    assert [len(b) for b in context.batches] == [4, 4, 2]
    assert seen == [(4, 10), (8, 10), (10, 10)]
    assert e.tokens == context.seen == list(range(1, 11))
    assert e.token_array.tolist() == e.tokens and logits_are_right(e, context)


def test_a_prompt_that_does_not_fit_is_refused_before_it_is_read() -> None:
    e, context = engine(n_ctx=10)
    with pytest.raises(ContextOverflowError) as caught:
        e.sync([1] * 12)
    assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (12, 10)
    assert context.batches == []
    e.sync([1, 2, 3])
    assert len(take(e, 3)) == 3 and len(context.seen) == 5


def test_a_token_outside_the_vocabulary_is_refused_before_it_is_read() -> None:
    e, context = engine()
    with pytest.raises(OptionError):
        e.prefill([1, 2, N_VOCAB])
    assert context.batches == [] and e.n_past == 0


def test_an_error_of_the_progress_callback_leaves_the_books_right() -> None:
    e, context = engine()

    def fail(done: int, total: int) -> None:
        raise KeyError("bar")

    with pytest.raises(KeyError):
        e.prefill([1] * 10, progress=fail)
    assert e.tokens == context.seen == [1] * 4
    assert e.sync([1] * 10) == 4 and e.tokens == [1] * 10


# -- generation ------------------------------------------------------------------------------------------


def test_generated_tokens_follow_from_all_tokens_before_them() -> None:
    e, context = engine()
    e.sync([3, 4])
    expected = [3, 4]
    for _ in range(5):
        expected.append(context.expected(expected))
    assert take(e, 5) == expected[2:]
    assert e.tokens == expected[:-1], "the last token has not been read"


def test_generation_ends_at_the_end_of_the_context() -> None:
    e, _ = engine(n_ctx=10)
    e.sync([1] * 6)
    assert len(list(e.generate(Greedy()))) == 4


def test_a_generator_closed_early_leaves_the_books_right() -> None:
    e, context = engine()
    e.sync([1, 2])
    stream = e.generate(Greedy())
    first = [next(stream), next(stream), next(stream)]
    stream.close()
    assert e.tokens == context.seen == [1, 2, *first[:2]]
    assert logits_are_right(e, context)


def test_generation_without_a_prompt_is_refused() -> None:
    e, _ = engine()
    with pytest.raises(OptionError):
        next(e.generate(Greedy()))


@pytest.mark.parametrize("n_right", [0, 1, 2, 3, 5])
def test_guessed_tokens_change_nothing_but_the_number_of_batches(n_right: int) -> None:
    plain, _ = engine()
    plain.sync([3, 4])
    expected = take(plain, 12)
    e, context = engine()
    e.sync([3, 4])
    n_before = len(context.batches)

    def draft(tokens: NDArray[np.intc]) -> list[int]:
        at = len(tokens) - 2
        assert tokens.tolist() == [3, 4, *expected[:at]]
        return [*expected[at : at + n_right], 9, 9][:3]

    assert take(e, 12, draft=draft) == expected
    assert e.tokens == context.seen == [3, 4, *expected[:-1]] and logits_are_right(e, context)
    n_batches = len(context.batches) - n_before
    assert n_batches <= 11 if n_right == 0 else n_batches <= 1 + 11 // min(n_right + 1, 4)


def test_guesses_are_taken_back_when_the_reader_stops() -> None:
    e, context = engine()
    e.sync([3, 4])
    stream = e.generate(Greedy(), draft=lambda tokens: [9, 9, 9])
    first = [next(stream), next(stream)]
    assert len(context.seen) == 6
    stream.close()
    assert e.tokens == context.seen == [3, 4, first[0]] and logits_are_right(e, context)


def test_guesses_outside_the_vocabulary_are_ignored() -> None:
    e, context = engine()
    e.sync([3, 4])
    take(e, 3, draft=lambda tokens: [N_VOCAB])
    assert e.tokens == context.seen


# -- sync ------------------------------------------------------------------------------------------------


def test_a_longer_prompt_reads_only_what_is_new() -> None:
    e, context = engine()
    e.sync([1, 2, 3])
    assert e.sync([1, 2, 3, 4, 5]) == 3
    assert context.batches == [[1, 2, 3], [4, 5]]


def test_a_prompt_that_differs_is_rolled_back_to_where_it_differs() -> None:
    e, context = engine()
    e.sync([1, 2, 3, 4, 5, 6])
    assert e.sync([1, 2, 9]) == 2
    assert context.seen == [1, 2, 9] and logits_are_right(e, context)


def test_a_prompt_is_read_anew_where_removal_is_not_exact() -> None:
    e, context = engine(removal_is_exact=lambda pos: False)
    e.sync([1, 2, 3, 4, 5, 6])
    assert e.sync([1, 2, 9]) == 0
    assert context.seen == [1, 2, 9]


def test_the_same_prompt_again_needs_no_decode_and_gives_the_same_logits() -> None:
    e, context = engine()
    e.sync([1, 2, 3])
    first = take(e, 5)
    n_batches = len(context.batches)
    assert e.sync([1, 2, 3]) == 3
    assert len(context.batches) == n_batches and take(e, 5) == first


def test_a_prefix_of_the_cache_decodes_one_token_for_its_logits() -> None:
    e, context = engine()
    e.sync([1, 2, 3, 4])
    assert e.sync([1, 2]) == 1
    assert context.batches[-1] == [2] and logits_are_right(e, context)


def test_a_reply_cut_into_other_tokens_is_not_read_again() -> None:
    e, _ = engine()
    e.sync([CONTROL, 1, 2, 3])  # "A" "B" "C"
    assert e.sync([CONTROL, 41, 3, CONTROL, 7]) == 4  # "AB" "C"
    assert e.tokens == [CONTROL, 1, 2, 3, CONTROL, 7]


def test_pins_move_with_the_tokens_that_stay() -> None:
    e, _, _ = evicting()
    e.sync([CONTROL, 1, 2, 3])
    e.sync([CONTROL, 41, 3, CONTROL, 7], pins=[(0, 2), (3, 5)])
    assert e.pins == [(0, 3), (4, 6)]


def test_pins_are_the_prompts_own_where_everything_is_read_anew() -> None:
    e, _, _ = evicting(removal_is_exact=lambda pos: False)
    e.sync([1, 2, 3, 4])
    e.sync([1, 9, 9], pins=[(0, 2)])
    assert e.tokens == [1, 9, 9] and e.pins == [(0, 2)]


def test_an_empty_prompt_is_refused() -> None:
    e, _ = engine()
    with pytest.raises(OptionError):
        e.sync([])


# -- rollback --------------------------------------------------------------------------------------------


def test_rolling_back_is_exact_or_refused() -> None:
    e, context, cache = evicting(budget=20)
    e.prefill([1 + i % 30 for i in range(40)])
    assert cache.used() == 20 and cache.rollback_min() == 32
    before = list(e.tokens)
    assert not e.rollback(31) and e.tokens == context.seen == before
    assert e.rollback(32) and e.tokens == context.seen == before[:32]


@pytest.mark.parametrize("n_past", [-1, 5])
def test_rolling_back_to_a_position_that_does_not_exist_is_refused(n_past: int) -> None:
    e, _ = engine()
    e.prefill([1, 2, 3, 4])
    with pytest.raises(OptionError):
        e.rollback(n_past)


def test_rolling_back_to_the_start_forgets_everything() -> None:
    e, context = engine(removal_is_exact=lambda pos: False)
    e.prefill([1, 2])
    assert e.rollback(0) and e.tokens == context.seen == []


def test_what_another_program_decoded_is_taken_back() -> None:
    e, context = engine()
    e.sync([1, 2])
    context.seen += [8, 9]  # a call torn off between llama_decode and the books
    e.sync([1, 2, 3])
    assert context.seen == [1, 2, 3]


def test_a_context_that_forgot_is_read_to_anew() -> None:
    e, context = engine()
    e.sync([1, 2, 3])
    context.seen.clear()
    assert e.sync([1, 2, 3, 4]) == 0
    assert context.seen == [1, 2, 3, 4]


# -- cancel ----------------------------------------------------------------------------------------------


def test_cancel_stops_a_prompt_after_the_batch_and_keeps_what_was_read() -> None:
    e, context = engine()
    cancel = CancelToken()

    def stop(done: int, total: int) -> None:
        if done == 8:
            cancel.cancel()

    with pytest.raises(Cancelled):
        e.sync([1] * 20, progress=stop, cancel=cancel)
    assert e.tokens == context.seen == [1] * 8
    assert e.sync([1] * 20) == 8


def test_cancel_inside_a_batch_keeps_the_batches_before_it() -> None:
    e, context = engine()
    cancel = CancelToken()
    context.before = lambda: cancel.cancel() if len(context.seen) == 4 else None
    with pytest.raises(Cancelled):
        e.prefill([1] * 20, cancel=cancel)
    assert e.tokens == context.seen == [1] * 4


def test_cancel_ends_a_generation_with_what_it_has() -> None:
    e, context = engine()
    cancel = CancelToken()
    e.sync([1, 2])
    got = []
    for token in e.generate(Greedy(), cancel=cancel):
        got.append(token)
        if len(got) == 3:
            cancel.cancel()
    assert len(got) == 3 and e.cancelled
    assert e.tokens == context.seen
    assert e.sync([1, 2, *got]) == 4 and logits_are_right(e, context)


# -- budget and policy -----------------------------------------------------------------------------------


def test_a_cache_at_rest_is_within_its_budget() -> None:
    e, _, cache = evicting(budget=20)
    e.prefill([1] * 33)
    assert cache.used() == 20
    take(e, 10)
    assert cache.used() == 20
    report = e.report()
    assert (report.policy, report.budget, report.used, report.evicted) == ("streaming", 20, 20, 22)
    assert (report.n_past, report.bytes) == (42, 4096)


@dataclass(frozen=True)
class Broken:
    budget: int = 20
    name: str = "broken"
    n_sink: int = 0
    n_recent: int = 8
    needs_scores: bool = False
    decay: float = 1.0
    n_observed: int = 0
    n_trace: int = 0
    mistake: Any = None

    def victims(self, view: Any, n: int) -> Any:
        if isinstance(self.mistake, BaseException):
            raise self.mistake
        return self.mistake(view, n)


@pytest.mark.parametrize(
    "mistake",
    [
        ZeroDivisionError("oops"),
        lambda view, n: np.zeros((1, 1, n + 1), np.int32),
        lambda view, n: np.zeros((1, 1, n), np.float32),
        lambda view, n: np.full((1, 1, n), 63, np.int32),
        lambda view, n: np.full((1, 1, n), view.n_used - 1, np.int32),
    ],
)
def test_a_policys_mistake_surfaces_from_the_call_and_the_engine_stays_usable(mistake: Any) -> None:
    e, context, _ = evicting(policy=Broken(mistake=mistake))
    with pytest.raises(PolicyError, match="broken") as caught:
        e.prefill([1] * 30)
    if isinstance(mistake, Exception):
        assert caught.value.__cause__ is mistake
    assert e.tokens == context.seen
    e.reset()
    e.prefill([1] * 10)
    assert logits_are_right(e, context)


def test_a_keyboard_interrupt_inside_a_policy_stays_one() -> None:
    e, context, _ = evicting(policy=Broken(mistake=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        e.prefill([1] * 30)
    assert e.tokens == context.seen


def test_a_policys_mistake_inside_the_decode_is_found_behind_the_native_code() -> None:
    error = ZeroDivisionError("oops")
    e, context, cache = evicting(policy=Broken(mistake=error))
    view = SimpleNamespace(
        scores=np.zeros((1, 1, 8), np.float32),
        pos=np.arange(8, dtype=np.int32).reshape(1, 1, 8),
        n_past=30,
        n_used=8,
        layer_ids=(0,),
        observation=None,
    )

    def native_asks() -> None:
        with pytest.raises(PolicyError):
            cache.fn(view, 1)

    context.before, context.codes = native_asks, [DECODE_NO_VICTIMS]
    with pytest.raises(PolicyError, match="oops"):
        e.prefill([1, 2, 3])
    assert e.tokens == context.seen == []


def test_pins_that_do_not_fit_are_refused_before_anything_changes() -> None:
    e, context, _ = evicting(budget=20)  # recent window 8
    e.sync([1, 2, 3], pins=[(0, 2)])
    with pytest.raises(BudgetError) as caught:
        e.sync([1, 2, 3, 4], pins=[(0, 13)])
    assert caught.value.n_pinned == 13
    assert e.tokens == context.seen == [1, 2, 3] and e.pins == [(0, 2)]


def test_pins_are_sorted_merged_and_counted_once() -> None:
    e, _, _ = evicting(budget=20)
    e.pins = [(8, 12), (0, 4), (3, 8), (15, 15)]
    assert e.pins == [(0, 12)]


# -- errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "error"), [(DECODE_NO_ROOM, CacheFullError), (-3, NativeError)])
def test_a_native_failure_is_an_error_and_the_next_call_is_right(code: int, error: type[Exception]) -> None:
    e, context = engine(codes=[0, code])
    with pytest.raises(error):
        e.sync([1] * 10)
    assert e.tokens == context.seen == [1] * 4
    assert e.sync([1] * 10) == 4 and logits_are_right(e, context)


def test_closing_twice_is_fine_and_use_after_closing_is_an_error() -> None:
    e, _, cache = evicting()
    e.close()
    e.close()
    assert cache.is_closed
    for use in (e.reset, lambda: e.sync([1]), lambda: e.prefill([1]), lambda: e.rollback(0)):
        with pytest.raises(ClosedError):
            use()


def test_a_stream_of_a_closed_engine_is_an_error() -> None:
    e, _ = engine()
    e.sync([1, 2])
    stream = e.generate(Greedy())
    next(stream)
    e.close()
    with pytest.raises(ClosedError):
        next(stream)


def test_a_session_taken_over_goes_on_with_its_own_logits() -> None:
    e, context = engine()
    context.seen[:] = [1, 2, 3]
    e.adopt([1, 2, 3], context.logits(1)[0])
    assert e.sync([1, 2, 3]) == 3 and context.batches == []
    assert take(e, 1) == [context.expected([1, 2, 3])]


# -- what the policy is told -----------------------------------------------------------------------------


@dataclass
class Noting:
    """Evicts the oldest, and notes (n_prompt, n_past) of every view."""

    budget: int = 20
    n_recent: int = 8
    notes: list[tuple[int, int]] = field(default_factory=list)

    def victims(self, view: Any, n: int) -> Any:
        self.notes.append((view.n_prompt, view.n_past))
        return np.where(view.pos >= 0, view.pos, 10**6).argsort(-1)[..., :n]


def test_the_policy_is_told_where_the_newest_prompt_ends() -> None:
    noting = Noting()
    e, _, _ = evicting(policy=as_policy(noting))
    e.prefill(list(range(1, 31)))
    assert noting.notes[-1] == (30, 30)
    take(e, 6)
    assert noting.notes[-1] == (30, e.n_past)
    e.prefill([1, 2, 3])
    assert noting.notes[-1] == (e.n_past, e.n_past)


def test_what_is_written_after_a_rollback_into_the_prompt_is_no_prompt() -> None:
    noting = Noting()
    e, _, _ = evicting(policy=as_policy(noting))
    e.prefill(list(range(1, 31)))
    assert e.rollback(26)
    e.prefill([1])
    assert e.rollback(26)
    e._logits = np.zeros(N_VOCAB, np.float32)
    take(e, 8)
    assert noting.notes[-1] == (26, e.n_past)
