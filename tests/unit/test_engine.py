"""The engine's books, on a context that is only books."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_fakes import CONTROL, N_VOCAB, Greedy, engine, evicting, logits_are_right, take
from numpy.typing import NDArray

from h2o_gguf.cancel import CancelToken
from h2o_gguf.decoding import DECODE_ABORTED, DECODE_NO_ROOM
from h2o_gguf.errors import (
    BudgetError,
    CacheFullError,
    Cancelled,
    ClosedError,
    ContextOverflowError,
    NativeError,
    OptionError,
)

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


def test_reading_nothing_changes_nothing() -> None:
    e, context, _ = evicting()
    e.prefill([1, 2, 3])
    e.prefill([], recall=True)
    assert e.tokens == [1, 2, 3] and context.seen == [1, 2, 3]


def test_a_cancelled_generation_can_be_gone_on_with() -> None:
    e, context = engine()
    e.prefill([1, 2, 3])
    cancel = CancelToken()
    stream = e.generate(Greedy(), cancel=cancel)
    first = [next(stream), next(stream)]
    context.codes = [DECODE_ABORTED]  # within the batch, not before it
    assert list(stream) == [] and e.cancelled
    assert e.tokens == context.seen == [1, 2, 3, first[0]] and logits_are_right(e, context)
    assert take(e, 1) == first[1:]


def test_a_policys_error_is_told_once() -> None:
    """Ctrl-C while it names victims, in a call that says so by itself."""
    e, context, _ = evicting(20)
    e.prefill([1] * 16)

    def interrupt(native: Any, n: int) -> Any:
        raise KeyboardInterrupt

    object.__setattr__(e._evictor.policy, "victims", interrupt)  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        e.prefill([2] * 8)
    object.__delattr__(e._evictor.policy, "victims")  # type: ignore[union-attr]
    e.prefill([3] * 4)
    assert e.tokens == context.seen and e.tokens[-4:] == [3] * 4


def test_pins_that_do_not_fit_are_refused_before_anything_is_forgotten() -> None:
    """In the prompt's own tokens, of which there are more than in the cache, and all must be read again."""
    e, context, cache = evicting(20)  # a recent window of 8, so 12 can be pinned
    merged = [41] * 12  # each spells what the tokens 1 and 2 do
    e.prefill([*merged, *[3] * 20])
    e.pins = [(0, 2)]
    cache.rollback_min = lambda: 30  # type: ignore[method-assign]
    before = list(e.tokens)
    with pytest.raises(BudgetError):
        e.sync([*[1, 2] * 12, *[3] * 2, 4], pins=[(0, 24)])
    assert e.tokens == context.seen == before and e.pins == [(0, 2)]
