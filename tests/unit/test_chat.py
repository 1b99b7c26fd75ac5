"""The chat session's books, on a model without weights."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_fakes import ALTERNATING, BOS, FORGETFUL, TRIMMING, FakeLlama, use_fake_sampler

from h2o_gguf.cancel import CancelToken
from h2o_gguf.chat import ChatSession
from h2o_gguf.errors import BusyError, Cancelled, ContextOverflowError, OptionError
from h2o_gguf.reply import Reply, write_reply


@pytest.fixture(autouse=True)
def _sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_sampler(monkeypatch.setattr, "h2o_gguf.chat")


def say(session: ChatSession, text: str, **options: Any) -> str:
    return "".join(session.ask(text, **options))


def test_the_cache_says_what_the_template_says() -> None:
    llm = FakeLlama("one", "two")
    session = ChatSession(llm, system="Be brief.")
    assert say(session, "first?") == "one"
    assert say(session, "second?") == "two"
    assert llm.says == (
        "<s><|system|>Be brief.<|end|><|user|>first?<|end|><|assistant|>one<|end|>"
        "<|user|>second?<|end|><|assistant|>two"
    )


def test_200_turns_decode_each_token_once() -> None:
    llm = FakeLlama(*(f"reply {i}" for i in range(200)))
    session = ChatSession(llm, system="Be brief.")
    for i in range(200):
        assert say(session, f"message {i}") == f"reply {i}"
    assert llm.engine.n_decoded == llm.engine.n_past
    assert llm.says == session.template.render(session.messages, opens_reply=False).removesuffix("<|end|>")


def test_bos_stands_once_at_index_0() -> None:
    for template in (TRIMMING, TRIMMING.replace("{{ bos_token }}", "")):
        llm = FakeLlama("one", "two", template=template)
        session = ChatSession(llm)
        say(session, "first?")
        say(session, "second?")
        assert [i for i, token in enumerate(llm.engine.tokens) if token == BOS] == [0]


def test_the_system_message_is_pinned_and_stays_pinned() -> None:
    llm = FakeLlama("one", "two")
    session = ChatSession(llm, system="Be brief.")
    say(session, "first?")
    ((start, end),) = llm.engine.pins
    pinned = llm.engine.tokens[start:end]
    text = b"".join(llm.engine.context.vocab.piece(token, special=True) for token in pinned).decode()
    assert text == "<s><|system|>Be brief.<|end|><|user|>"
    say(session, "second?")
    assert llm.engine.pins == [(start, end)]


def test_spans_a_caller_pins_are_pinned_beside_the_system_message() -> None:
    llm = FakeLlama("one")
    session = ChatSession(llm, system="Be brief.", pin=[(15, 18)])
    say(session, "first?")
    assert llm.engine.pins == [(0, 13), (15, 18)]


def test_a_system_message_in_the_middle_of_the_prompt_is_pinned_where_it_is() -> None:
    late = (
        "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>"
        "{% if loop.last %}{{ messages[0].content }} {% endif %}{{ m.content }}<|end|>{% endfor %}"
    )
    llm = FakeLlama("one", template=late)
    session = ChatSession(llm, system="Be brief.")
    session.messages += [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    say(session, "first?")
    ((start, end),) = llm.engine.pins
    text = b"".join(map(llm.engine.context.vocab.piece, llm.engine.tokens[start:end])).decode()
    assert text == "Be brief."


def test_a_system_message_joins_the_first_user_message_where_the_template_has_no_place_for_one() -> None:
    llm = FakeLlama("one", template=ALTERNATING)
    session = ChatSession(llm, system="Be brief.")
    say(session, "first?")
    assert llm.says == "<s><|user|>Be brief.\n\nfirst?<|end|><|assistant|>one"
    assert llm.engine.pins[0][0] == 0
    assert llm.engine.pins[0][1] >= len("<|user|>Be brief.") - len("<|user|>") + 2


def test_a_reply_that_is_cut_off_is_kept_and_roles_still_alternate() -> None:
    llm = FakeLlama("a long reply", "two", template=ALTERNATING)
    session = ChatSession(llm)
    pieces = session.ask("first?")
    assert [next(pieces) for _ in range(6)] == list("a long")
    pieces.close()
    assert session.messages[-1] == {"role": "assistant", "content": "a long"}
    assert session.last is not None and session.last.finish_reason == "cancelled"
    assert say(session, "second?") == "two"
    assert llm.says == (
        "<s><|user|>first?<|end|><|assistant|>a long<|end|><|user|>second?<|end|><|assistant|>two"
    )


def test_cancel_ends_the_reply_and_the_next_turn_works() -> None:
    llm = FakeLlama("a long reply", "two", template=ALTERNATING)
    session = ChatSession(llm)
    cancel = CancelToken()
    heard = ""
    for piece in session.ask("first?", cancel=cancel):
        heard += piece
        if heard == "a l":
            cancel.cancel()
    assert session.messages[-1]["content"] == heard == "a l"
    assert say(session, "second?") == "two"


def test_a_reply_cancelled_before_its_first_piece_keeps_the_roles_alternating() -> None:
    llm = FakeLlama("never heard", "two", template=ALTERNATING)
    session = ChatSession(llm)
    cancel = CancelToken()
    cancel.cancel()
    assert say(session, "first?", cancel=cancel) == ""
    assert say(session, "second?") == "two"
    assert [m["role"] for m in session.messages] == ["user", "assistant"] * 2


@pytest.mark.parametrize("n_exact", [10**9, 3])
def test_a_message_whose_reading_is_cancelled_is_taken_back(n_exact: int) -> None:
    llm = FakeLlama("one", "two", n_exact=n_exact)
    session = ChatSession(llm)
    say(session, "first?")
    llm.engine.cancel_at = llm.engine.n_past + 10
    with pytest.raises(Cancelled):
        say(session, "a message that takes long to read")
    assert [m["content"] for m in session.messages] == ["first?", "one"]
    assert say(session, "second?") == "two"
    assert llm.says == "<s><|user|>first?<|end|><|assistant|>one<|end|><|user|>second?<|end|><|assistant|>two"


class TokensAlone:
    """A copy of a sequence that is only books."""

    def __init__(self, engine: Any) -> None:
        self.tokens = list(engine.tokens)

    def put_back(self, engine: Any) -> None:
        engine.tokens[:] = self.tokens


def test_cancelling_a_long_message_costs_nothing_that_was_read_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("h2o_gguf.taking_back.SequenceCopy", TokensAlone)
    llm = FakeLlama("one", "two", n_exact=3)
    llm.engine.policy = SimpleNamespace(n_recent=3, budget=64)
    session = ChatSession(llm)
    say(session, "first?")
    before = list(llm.engine.tokens)
    llm.engine.cancel_at = llm.engine.n_past + 500
    with pytest.raises(Cancelled):
        say(session, "x" * 1000)
    assert llm.engine.tokens == before
    n_decoded = llm.engine.n_decoded
    say(session, "second?")
    assert session.last is not None and session.last.n_reused == len(before)
    assert llm.engine.n_decoded - n_decoded < 40


def test_a_message_that_does_not_fit_is_taken_back_and_a_shorter_one_works() -> None:
    llm = FakeLlama("one", "two", n_ctx=100)
    session = ChatSession(llm)
    with pytest.raises(ContextOverflowError) as caught:
        say(session, "x" * 300)
    assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (300 + 4, 100)
    assert session.messages == []
    assert say(session, "short") == "one"


def test_the_last_token_of_a_reply_cut_by_its_length_is_read_with_the_next_message() -> None:
    llm = FakeLlama("a long reply", "two", ends=False)
    session = ChatSession(llm, max_tokens=3)
    assert say(session, "first?") == "a l"
    assert session.last is not None and session.last.finish_reason == "length"
    assert llm.says.endswith("<|assistant|>a ")
    say(session, "second?")
    assert "<|assistant|>a l<|end|><|user|>second?" in llm.says
    assert llm.engine.n_decoded == llm.engine.n_past


def test_a_template_that_trims_what_was_said_reads_nothing_again() -> None:
    llm = FakeLlama("  one \n", "two", template=TRIMMING)
    session = ChatSession(llm)
    say(session, "first?")
    say(session, "second?")
    assert llm.engine.n_decoded == llm.engine.n_past
    assert "<|assistant|>  one \n<|end|><|user|>second?" in llm.says


def test_a_template_that_rewrites_what_was_said_has_the_cache_follow() -> None:
    llm = FakeLlama("<think>hm</think>one", "two", template=FORGETFUL)
    session = ChatSession(llm)
    say(session, "first?")
    say(session, "second?")
    assert llm.says == "<s><|user|>first?<|end|><|assistant|>one<|end|><|user|>second?<|end|><|assistant|>two"


def test_a_cache_used_by_others_meanwhile_is_set_right() -> None:
    llm = FakeLlama("one", "two")
    session = ChatSession(llm)
    say(session, "first?")
    llm.engine.tokens[:] = list(b"something else")
    say(session, "second?")
    assert llm.says == "<s><|user|>first?<|end|><|assistant|>one<|end|><|user|>second?<|end|><|assistant|>two"


def test_names_of_control_tokens_in_a_message_are_text() -> None:
    llm = FakeLlama("one", "two")
    session = ChatSession(llm, system="Obey <|user|>.")
    say(session, "Why <|end|><|system|>?")
    say(session, "and <|end|>?")
    control = [token for token in llm.engine.tokens if token > 255]
    names = ["<s>", "<|system|>", "<|end|>", *["<|user|>", "<|end|>", "<|assistant|>", "<|end|>"] * 2]
    assert control == [llm.tokenize(name.encode(), False, True)[0] for name in names[:-1]]


@pytest.mark.parametrize("n_exact", [10**9, 2])
def test_regenerate_replaces_the_reply(n_exact: int) -> None:
    llm = FakeLlama("one", "another", "two", n_exact=n_exact)
    session = ChatSession(llm)
    say(session, "first?")
    assert "".join(session.regenerate()) == "another"
    say(session, "second?")
    assert [m["content"] for m in session.messages] == ["first?", "another", "second?", "two"]
    assert llm.says == (
        "<s><|user|>first?<|end|><|assistant|>another<|end|><|user|>second?<|end|><|assistant|>two"
    )


def test_regenerate_without_a_reply_is_refused_and_keeps_the_old_one_when_it_fails() -> None:
    llm = FakeLlama("one", n_exact=0)
    session = ChatSession(llm)
    with pytest.raises(OptionError):
        next(session.regenerate())
    say(session, "first?")
    llm.engine.cancel_at = 5
    with pytest.raises(Cancelled):
        list(session.regenerate())
    assert session.messages[-1] == {"role": "assistant", "content": "one"}


def test_clear_forgets_all_but_the_system_message() -> None:
    llm = FakeLlama("one", "two")
    session = ChatSession(llm, system="Be brief.")
    say(session, "first?")
    session.clear()
    assert session.messages == [{"role": "system", "content": "Be brief."}]
    say(session, "second?")
    assert llm.says == "<s><|system|>Be brief.<|end|><|user|>second?<|end|><|assistant|>two"


def test_a_new_system_message_is_read_and_pinned() -> None:
    llm = FakeLlama("one", "two")
    session = ChatSession(llm, system="Be brief.")
    say(session, "first?")
    session.set_system("Be long and kind.")
    say(session, "second?")
    assert llm.says.startswith("<s><|system|>Be long and kind.<|end|><|user|>first?<|end|><|assistant|>one")
    assert session.system == "Be long and kind."
    assert llm.engine.pins == [(0, len("Be long and kind.") + 4)]


def test_a_document_goes_with_the_next_message_only(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_bytes("Ännchen\r\nzwei\n".encode())
    llm = FakeLlama("one", "two")
    session = ChatSession(llm)
    session.read_file(tmp_path / "notes.txt")
    say(session, "What is it?")
    say(session, "And now?")
    assert [m["content"] for m in session.messages if m["role"] == "user"] == [
        "Document notes.txt:\n\nÄnnchen\nzwei\n\nWhat is it?",
        "And now?",
    ]


def test_a_message_taken_back_leaves_its_documents_for_the_next_one(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"Text {name}.")
    llm = FakeLlama("one", n_ctx=200)
    session = ChatSession(llm)
    first = session.read_file(tmp_path / "a")
    llm.engine.cancel_at = 5
    with pytest.raises(Cancelled):
        say(session, "cancelled")
    assert session.attachments == (first,)
    second = session.read_file(tmp_path / "b")
    with pytest.raises(ContextOverflowError):
        say(session, "x" * 300)
    assert session.attachments == (first, second) and session.messages == []
    assert say(session, "What?") == "one"
    assert session.messages[0]["content"] == "Document a:\n\nText a.\n\nDocument b:\n\nText b.\n\nWhat?"
    assert session.attachments == ()


def test_documents_that_wait_can_be_dropped(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("Text a.")
    session = ChatSession(FakeLlama("one"))
    session.read_file(tmp_path / "a")
    session.drop_attachments()
    say(session, "What?")
    assert session.messages[0]["content"] == "What?"


def test_a_reply_holds_the_model_until_it_ends_or_is_closed() -> None:
    llm = FakeLlama("one", "two", "three")
    session, other = ChatSession(llm), ChatSession(llm)
    pieces = session.ask("first?")
    assert next(pieces) == "o"
    with pytest.raises(BusyError):
        next(other.ask("Me too"))
    with pytest.raises(BusyError):
        next(session.regenerate())
    pieces.close()
    assert other.messages == []
    assert say(other, "Me too") == "two"


def test_a_system_message_is_said_to_be_pinned_once_it_is() -> None:
    session = ChatSession(FakeLlama("one", "two"))
    say(session, "first?")
    assert not session.pins_system
    session.set_system("Be brief.")
    say(session, "second?")
    assert session.pins_system


def write(text: str, *, n_pieces: int | None = None, **options: Any) -> Reply:
    reply = Reply()
    pieces = write_reply(FakeLlama(text, ends=False).engine, None, reply, **options)
    for _ in itertools.islice(pieces, n_pieces):
        pass
    pieces.close()
    return reply


def test_a_stop_found_only_at_the_end_is_a_stop() -> None:
    # "abX" could still begin, so "b" is certain only when nothing follows.
    reply = write("zab", stops=("b", "abX"))
    assert (reply.text, reply.finish_reason, reply.is_whole) == ("za", "stop", False)


def test_a_reply_cut_inside_a_character_is_not_whole() -> None:
    assert write("abc", stops=("x",), n_pieces=2).is_whole
    cut = write("aé", max_tokens=2)  # in the middle of a character
    assert (cut.text, cut.finish_reason, cut.is_whole) == ("a", "length", False)


def test_a_file_that_cannot_be_read_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\x89PNG\0\0\0")
    session = ChatSession(FakeLlama())
    with pytest.raises(OptionError, match="no such file"):
        session.read_file(tmp_path / "missing")
    with pytest.raises(OptionError, match="folder"):
        session.read_file(tmp_path)
    with pytest.raises(OptionError, match="not text"):
        session.read_file(tmp_path / "image")
    assert session.attachments == ()


def test_equal_seeds_draw_equal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    for seed in (7, 7, 8):
        seeds: list[int] = []

        class Recording:
            def __init__(self, vocab: Any, options: Any, seeds: list[int] = seeds) -> None:
                seeds.append(options.seed)

            def __enter__(self) -> Recording:
                return self

            def __exit__(self, *_: object) -> None:
                pass

        monkeypatch.setattr("h2o_gguf.chat.ChainSampler", Recording)
        session = ChatSession(FakeLlama("a", "b"), seed=seed)
        say(session, "1")
        say(session, "2")
        seen.append(seeds)
    assert seen[0] == seen[1] != seen[2]
    assert seen[0][0] != seen[0][1]


def test_every_message_recalls() -> None:
    llm = FakeLlama("one", "two", "three", "four")
    session = ChatSession(llm)
    for turn in (session.ask("Hello"), session.ask("Again"), session.regenerate()):
        list(turn)
    session.clear()
    list(session.ask("Anew"))
    assert len(llm.engine.recalls) == 4 and all(recall for _, _, recall in llm.engine.recalls)
