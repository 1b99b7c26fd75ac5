"""A new prompt keeps the cached tokens that say the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from h2o_gguf.align import align

# Token i spells PIECES[i]; 0 is a control token.
PIECES: list[bytes | None] = [None, b"a", b"b", b"aa", b"ab", b"ba", b"bb", b"aab", b""]
TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=12)


def piece(token: int) -> bytes | None:
    return PIECES[token]


def spelled(tokens: list[int]) -> list[bytes | int]:
    """Bytes with the control tokens between them."""
    parts: list[bytes | int] = [b""]
    for token in tokens:
        text = PIECES[token]
        if text is None:
            parts += [token, b""]
        else:
            parts[-1] = parts[-1] + text  # type: ignore[operator]
    return parts


@given(TOKENS, TOKENS)
def test_what_matches_spells_the_same(cached: list[int], prompt: list[int]) -> None:
    match = align(cached, prompt, piece)
    assert spelled(cached[: match.n_cached]) == spelled(prompt[: match.n_prompt])


@given(TOKENS, TOKENS)
def test_equal_tokens_at_the_start_always_match(cached: list[int], prompt: list[int]) -> None:
    n = 0
    while n < min(len(cached), len(prompt)) and cached[n] == prompt[n]:
        n += 1
    match = align(cached, prompt, piece)
    assert match.n_cached >= n and match.n_prompt >= n


@given(TOKENS)
def test_a_sequence_matches_itself_whole(tokens: list[int]) -> None:
    match = align(tokens, tokens, piece)
    assert (match.n_cached, match.n_prompt) == (len(tokens), len(tokens))


def test_a_reply_cut_into_other_tokens_is_kept() -> None:
    # cached: control, a, b, ba; the prompt spells the reply as ab, b, a and goes on.
    match = align([0, 1, 2, 5], [0, 4, 2, 1, 0, 1], piece)
    assert (match.n_cached, match.n_prompt) == (4, 4)


def test_a_control_token_matches_only_itself() -> None:
    assert align([1, 0, 1], [1, 1, 0], piece).n_cached == 1


def test_pieces_that_do_not_end_together_do_not_match() -> None:
    match = align([1, 3], [1, 1], piece)  # "a" "aa" against "a" "a"
    assert (match.n_cached, match.n_prompt) == (1, 1)


def test_spans_move_with_the_tokens_that_stay() -> None:
    # "ab" is one token in the prompt and two in the cache, so what follows sits one position later.
    match = align([0, 1, 2, 0, 6], [0, 4, 0, 6, 1], piece)
    assert match.n_cached == 5
    assert [match.position(i) for i in (0, 1, 2, 3, 4)] == [0, 1, 3, 4, 5]


def test_a_span_that_cuts_a_run_grows_to_its_borders() -> None:
    # cache: ab b, prompt: a bb; a border inside the run does not exist on the other side.
    match = align([4, 2, 0], [1, 6, 0], piece)
    assert (match.position(1), match.position(2)) == (1, 2)
    match = align([1, 2, 2, 0], [4, 2, 0], piece)
    assert (match.position(0), match.position(1, end=True), match.position(1)) == (0, 2, 2)


def test_positions_past_the_match_go_on_behind_it() -> None:
    match = align([1, 2], [4, 1, 1], piece)  # "a" "b" kept for "ab"
    assert match.n_cached == 2
    assert [match.position(i) for i in (1, 2, 3)] == [2, 3, 4]
