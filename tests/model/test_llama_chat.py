"""create_chat_completion: templates, long chats inside a budget, pinned system messages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_harness import open_llama, open_tiny

from h2o_gguf.errors import BudgetError, OptionError

SYSTEM = {"role": "system", "content": "You are a terse assistant called Bob. Answer in a few words."}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with open_llama(kv_budget=256, pin="system") as llama:
        yield llama


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def pinned_everywhere(llm: Any) -> bool:
    """Whether every head still holds every pinned position."""
    pos = llm.engine.cache.pos
    return all((((pos >= a) & (pos < b)).sum(-1) == b - a).all() for a, b in llm.engine.pins)


def test_a_chats_result_has_llama_cpps_keys_and_ours(llm: Any) -> None:
    result = llm.create_chat_completion([SYSTEM, user("Hello")], max_tokens=8, temperature=0)
    assert set(result) == {"id", "object", "created", "model", "choices", "usage", "kv"}
    assert result["object"] == "chat.completion"
    assert set(result["choices"][0]) == {"index", "message", "logprobs", "finish_reason"}
    assert result["choices"][0]["message"]["role"] == "assistant"
    assert result["kv"]["policy"] == "h2o+" and result["kv"]["budget"] == 256


def test_a_streamed_chat_joins_to_the_whole_and_ends_with_the_report(llm: Any) -> None:
    messages = [SYSTEM, user("Name a colour.")]
    whole = llm.create_chat_completion(messages, max_tokens=12, temperature=0)
    chunks = list(llm.create_chat_completion(messages, max_tokens=12, temperature=0, stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant"} and deltas[-1] == {}
    content = "".join(delta.get("content", "") for delta in deltas)
    assert content == whole["choices"][0]["message"]["content"] != ""
    assert chunks[-1]["kv"] == whole["kv"]
    assert all("kv" not in chunk for chunk in chunks[:-1])


def test_a_handler_that_completes_only_when_it_is_read_keeps_pin_and_report(llm: Any) -> None:
    def handler(*, llama: Any, messages: Any, **options: Any) -> Iterator[dict[str, Any]]:
        prompt = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        for chunk in llama.create_completion(prompt, stream=True, max_tokens=3, temperature=0):
            choice = chunk["choices"][0]
            delta = {"content": choice["text"]}
            yield {"choices": [{"delta": delta, "finish_reason": choice["finish_reason"]}]}

    llm.reset()
    llm.chat_handler = handler
    try:
        chunks = list(llm.create_chat_completion([SYSTEM, user("Hello")], stream=True))
    finally:
        llm.chat_handler = None
    assert chunks[-1]["kv"]["policy"] == "h2o+"
    [(start, end)] = llm.engine.pins
    assert SYSTEM["content"] in llm.detokenize(llm.engine.tokens[start:end]).decode()
    assert llm("Hello", max_tokens=1)["choices"] and llm.engine.pins == [], "the chat is over"


def test_sixty_turns_fit_into_a_budget_of_256(llm: Any) -> None:
    llm.reset()
    messages: list[dict[str, str]] = [SYSTEM]
    n_read = 0
    for turn in range(60):
        messages.append(user(f"Question {turn}: say something about the number {turn * 7}."))
        n_before = llm.engine.n_past
        result = llm.create_chat_completion(messages, max_tokens=6, temperature=0.8, seed=turn)
        reply = result["choices"][0]["message"]["content"]
        assert reply.strip(), f"turn {turn} has no reply"
        messages.append({"role": "assistant", "content": reply})
        assert result["kv"]["used"] <= 256
        assert pinned_everywhere(llm), f"the system message lost entries in turn {turn}"
        assert result["usage"]["prompt_tokens"] > n_before or turn == 0, "the chat was cut"
        n_read += llm.engine.n_past - n_before
    assert result["kv"]["n_past"] > 1500 and result["kv"]["evicted"] > 1200
    assert n_read == llm.engine.n_past, "no turn was read twice"
    [(start, end)] = llm.engine.pins
    spelled = llm.detokenize(llm.engine.tokens[start:end], special=True).decode()
    assert spelled == f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>"


def test_a_turn_that_is_taken_back_is_rolled_back_and_not_read_again(llm: Any) -> None:
    llm.reset()
    messages = [SYSTEM, user("Tell me about the sea.")]
    first = llm.create_chat_completion(messages, max_tokens=10, temperature=0)
    again = llm.create_chat_completion(messages, max_tokens=10, temperature=0)
    assert again["choices"] == first["choices"]
    assert again["kv"]["n_past"] == first["kv"]["n_past"]


def test_a_system_message_larger_than_the_budget_is_refused_with_numbers(llm: Any) -> None:
    with pytest.raises(BudgetError) as caught:
        llm.create_chat_completion([{"role": "system", "content": "very " * 300}, user("Hi")], max_tokens=2)
    assert caught.value.budget == 256 and caught.value.n_pinned > 256
    assert llm.create_chat_completion([SYSTEM, user("Hi")], max_tokens=2)["choices"]


def test_json_mode_and_tools_come_from_llama_cpp(llm: Any) -> None:
    import json

    result = llm.create_chat_completion(
        [user("Give me JSON with a key a.")],
        response_format={
            "type": "json_object",
            "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        },
        temperature=0,
        max_tokens=40,
    )
    assert isinstance(json.loads(result["choices"][0]["message"]["content"])["a"], bool)
    tool = {
        "type": "function",
        "function": {
            "name": "set",
            "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
        },
    }
    called = llm.create_chat_completion(
        [user("Turn the light on.")],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "set"}},
        temperature=0,
        max_tokens=40,
    )
    call = called["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "set" and "on" in json.loads(call["arguments"])
    assert called["kv"]["policy"] == "h2o+"


@pytest.mark.parametrize("writes_bos", [True, False])
def test_bos_is_there_once_and_only_at_the_start(writes_bos: bool, tmp_path: Path) -> None:
    template = ("{{ bos_token }}" if writes_bos else "") + CHATML
    with open_tiny("llama", tmp_path, build={"chat_template": template}, kv_budget=200) as llama:
        messages = [user("a")]
        for _ in range(3):
            llama.create_chat_completion(messages, max_tokens=3, temperature=0)
            assert llama.engine.tokens[0] == llama.token_bos()
            assert llama.engine.tokens.count(llama.token_bos()) == 1
            messages += [{"role": "assistant", "content": "b"}, user("c")]
        llama("<s>text that names the token", max_tokens=1)
        assert llama.engine.tokens[:2].count(llama.token_bos()) == 1


@pytest.mark.parametrize("template", ["{% unknown_tag %}x{% endunknown %}", "{{ 1 +", "{% for x in %}"])
def test_a_model_whose_template_cannot_be_read_loads_and_fails_only_when_it_is_used(
    template: str, tmp_path: Path
) -> None:
    with open_tiny("llama", tmp_path, build={"chat_template": template}, kv_budget=100) as llama:
        assert llama("abc", max_tokens=2)["usage"]["completion_tokens"] == 2
        with pytest.raises(OptionError, match="chat_format"):
            llama.create_chat_completion([user("a")], max_tokens=2)
        llama.chat_format = "chatml"
        assert llama.create_chat_completion([user("a")], max_tokens=2)["choices"]


def test_a_template_that_raises_fails_in_its_own_words_and_the_object_stays_usable(tmp_path: Path) -> None:
    template = "{% if messages|length > 1 %}{{ raise_exception('only one message') }}{% endif %}" + CHATML
    with open_tiny("llama", tmp_path, build={"chat_template": template}, kv_budget=100) as llama:
        with pytest.raises(ValueError, match="only one message"):
            llama.create_chat_completion([user("a"), user("b")], max_tokens=2)
        assert llama.create_chat_completion([user("a")], max_tokens=2)["choices"]


def test_bytes_that_are_tokens_never_show_half_a_character(tmp_path: Path) -> None:
    wanted = list("né🌟好".encode())
    with open_tiny("llama", tmp_path, kv_budget=100) as llama:
        byte = {
            b: llama.tokenize(b"\\x00"[:0] + bytes([b]), add_bos=False)[-1] for b in set(wanted) if b < 128
        }
        first_byte = byte[ord("n")] - ord("n")  # the tiny vocabulary has the bytes in order
        start = len(llama.tokenize(b"a"))

        def spell(ids: Any, logits: Any) -> Any:
            logits[:] = -1e9
            at = len(ids) - start
            logits[first_byte + wanted[at] if at < len(wanted) else llama.token_eos()] = 0
            return logits

        chunks = [c["choices"][0]["text"] for c in llama("a", logits_processor=[spell], stream=True)]
        assert chunks == ["n", "é", "🌟", "好", ""]
        cut = llama("a", logits_processor=[spell], max_tokens=5)
        assert cut["choices"][0]["text"] == "né", "half of an emoji is not shown"
