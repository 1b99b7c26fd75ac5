"""create_completion: shapes, limits, stops, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llama_harness import english, open_llama

from h2o_gguf.errors import ContextOverflowError, OptionError

PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24}


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with open_llama(policy="none", n_ctx=256) as llama:
        yield llama


def text(result: dict[str, Any]) -> str:
    return str(result["choices"][0]["text"])


def test_a_result_has_llama_cpps_keys_and_ours(llm: Any) -> None:
    result = llm(PROMPT, **GREEDY)
    assert set(result) == {"id", "object", "created", "model", "choices", "usage", "kv"}
    assert result["object"] == "text_completion" and result["id"].startswith("cmpl-")
    assert set(result["choices"][0]) == {"text", "index", "logprobs", "finish_reason"}
    assert result["usage"] == {"prompt_tokens": 5, "completion_tokens": 24, "total_tokens": 29}
    assert set(result["kv"]) >= {"policy", "budget", "used", "evicted", "n_past", "bytes"}
    assert "Paris" in text(result)


def test_a_streams_chunks_have_llama_cpps_keys_and_join_to_the_whole_text(llm: Any) -> None:
    whole = llm(PROMPT, **GREEDY)
    chunks = list(llm(PROMPT, stream=True, **GREEDY))
    assert "".join(text(chunk) for chunk in chunks) == text(whole)
    for chunk in chunks[:-1]:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        assert chunk["choices"][0]["finish_reason"] is None
    assert chunks[-1]["choices"][0]["finish_reason"] == "length" and text(chunks[-1]) == ""
    assert chunks[-1]["kv"] == whole["kv"]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_prompt_longer_than_the_context_is_refused_and_the_next_works(llm: Any) -> None:
    tokens = llm.tokenize(english(3000).encode())[:300]
    for stream in (False, True):
        with pytest.raises(ContextOverflowError) as caught:
            llm(tokens, stream=stream)
        assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (300, 256)
    assert isinstance(caught.value, ValueError)
    assert "Paris" in text(llm(PROMPT, **GREEDY))


def test_an_answer_that_runs_into_the_end_of_the_context_is_returned(llm: Any) -> None:
    tokens = llm.tokenize(english(3000).encode())[:240]
    result = llm(tokens, temperature=0, logit_bias={llm.token_eos(): -100.0})
    assert result["choices"][0]["finish_reason"] == "length"
    assert result["usage"]["total_tokens"] == 256 and text(result)


def test_a_stop_is_not_in_the_text_and_the_earliest_wins(llm: Any) -> None:
    whole = text(llm(PROMPT, **GREEDY))
    late, early = whole[40:46], whole[12:18]
    assert whole.index(early) < whole.index(late)
    result = llm(PROMPT, stop=[late, early], **GREEDY)
    assert text(result) == whole[: whole.index(early)]
    assert result["choices"][0]["finish_reason"] == "stop"
    streamed = list(llm(PROMPT, stop=[late, early], stream=True, **GREEDY))
    assert "".join(map(text, streamed)) == text(result)


def test_a_stop_that_does_not_complete_is_released(llm: Any) -> None:
    whole = text(llm(PROMPT, **GREEDY))
    assert text(llm(PROMPT, stop=whole[-3:] + "never", **GREEDY)) == whole


def test_equal_seeds_give_equal_texts_on_a_used_and_on_a_fresh_object(llm: Any) -> None:
    options: dict[str, Any] = {"max_tokens": 16, "temperature": 1.2, "seed": 7}
    first = text(llm("Once upon a time", **options))
    llm("Something else entirely", **GREEDY)
    assert text(llm("Once upon a time", **options)) == first
    assert text(llm("Once upon a time", **{**options, "seed": 8})) != first
    with open_llama(policy="none", n_ctx=256) as fresh:
        assert text(fresh("Once upon a time", **options)) == first


def test_an_objects_seed_makes_its_generations_repeat() -> None:
    texts = []
    for _ in range(2):
        with open_llama(policy="none", n_ctx=256, seed=5) as llama:
            texts.append([text(llama("A", max_tokens=8, temperature=1.5)) for _ in range(2)])
    assert texts[0] == texts[1] and texts[0][0] != texts[0][1]


def test_log_probabilities_are_those_of_the_softmax(llm: Any) -> None:
    result = llm(PROMPT, logprobs=3, temperature=0, max_tokens=4)
    logprobs = result["choices"][0]["logprobs"]
    assert [len(logprobs[key]) for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs")] == [
        4
    ] * 4
    assert "".join(logprobs["tokens"]) == text(result)
    assert logprobs["text_offset"][0] == len(PROMPT)
    llm.reset()
    llm.eval(llm.tokenize(PROMPT.encode()))
    logits = llm.scores[-1].astype(np.float64)
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    assert logprobs["token_logprobs"][0] == pytest.approx(expected.max(), abs=1e-3)
    assert len(logprobs["top_logprobs"][0]) == 3
    assert max(logprobs["top_logprobs"][0].values()) == logprobs["token_logprobs"][0]


def test_log_probabilities_of_a_stream_are_those_of_the_whole(llm: Any) -> None:
    whole = llm(PROMPT, logprobs=2, temperature=0, max_tokens=6)["choices"][0]["logprobs"]
    chunks = [
        c["choices"][0]["logprobs"] for c in llm(PROMPT, logprobs=2, temperature=0, max_tokens=6, stream=True)
    ]
    assert [token for c in chunks if c for token in c["tokens"]] == whole["tokens"]
    assert [p for c in chunks if c for p in c["token_logprobs"]] == whole["token_logprobs"]


def test_echo_says_the_prompt_and_scores_it(llm: Any) -> None:
    result = llm(PROMPT, echo=True, logprobs=1, temperature=0, max_tokens=2)
    assert text(result).startswith(PROMPT)
    logprobs = result["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == text(result)
    assert logprobs["token_logprobs"][0] is None and logprobs["text_offset"][0] == 0
    assert all(p <= 0 for p in logprobs["token_logprobs"][1:])
    chunks = list(llm(PROMPT, echo=True, stream=True, temperature=0, max_tokens=2))
    assert "".join(map(text, chunks)) == text(result)


def test_a_suffix_is_appended_where_the_model_knows_no_infill(llm: Any) -> None:
    assert text(llm(PROMPT, suffix=" THE END", **GREEDY)).endswith(" THE END")


def test_a_grammar_is_obeyed_and_ends_the_text(llm: Any) -> None:
    from llama_cpp import LlamaGrammar

    grammar = LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    for seed in range(3):
        result = llm("Is the sky green?", grammar=grammar, temperature=2.0, seed=seed)
        assert text(result) in ("yes", "no") and result["choices"][0]["finish_reason"] == "stop"


def test_a_grammar_that_cannot_be_read_is_refused_and_the_next_call_works(llm: Any) -> None:
    from llama_cpp import LlamaGrammar

    with pytest.raises(OptionError, match="grammar"):
        llm(PROMPT, grammar=LlamaGrammar.from_string("root ::= (", verbose=False))
    assert "Paris" in text(llm(PROMPT, **GREEDY))


def test_biases_and_processors_change_the_choice(llm: Any) -> None:
    from llama_cpp import LogitsProcessorList

    token = llm.tokenize(b" London", add_bos=False)[0]
    assert text(llm(PROMPT, logit_bias={str(token): 100.0}, temperature=0, max_tokens=2)) == " London London"
    seen: list[int] = []

    def only_london(ids: Any, logits: Any) -> Any:
        seen.append(len(ids))
        logits[:] = -np.inf
        logits[token] = 0
        return logits

    result = llm(PROMPT, logits_processor=LogitsProcessorList([only_london]), temperature=1.0, max_tokens=2)
    assert text(result) == " London London" and seen == [5, 6]


def test_processors_that_leave_no_token_end_the_text(llm: Any) -> None:
    result = llm(PROMPT, logits_processor=[lambda ids, logits: np.full_like(logits, -np.inf)])
    assert text(result) == "" and result["choices"][0]["finish_reason"] == "stop"


def test_an_error_of_a_processor_surfaces_and_the_next_call_works(llm: Any) -> None:
    def broken(ids: Any, logits: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llm(PROMPT, logits_processor=[broken])
    with pytest.raises(OptionError, match="shape"):
        llm(PROMPT, logits_processor=[lambda ids, logits: logits[:5]])
    assert "Paris" in text(llm(PROMPT, **GREEDY))


@pytest.mark.parametrize(
    "knobs",
    [{"mirostat_mode": 1}, {"mirostat_mode": 2}, {"temperature": -1.0}, {"typical_p": 0.5}, {"top_k": 0},
     {"repeat_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5}],
)  # fmt: skip
def test_every_sampler_repeats_with_its_seed(llm: Any, knobs: dict[str, Any]) -> None:
    first, second = (text(llm("Dear", max_tokens=8, seed=3, **knobs)) for _ in range(2))
    assert first == second != ""


@pytest.mark.parametrize(
    "knobs",
    [
        {"repeat_penalty": 0.0},
        {"mirostat_mode": 3},
        {"temperature": float("nan")},
        {"logit_bias": {10**6: 1.0}},
    ],
)
def test_illegal_knobs_are_refused_before_native_code_sees_them(llm: Any, knobs: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        llm(PROMPT, max_tokens=2, **knobs)


@pytest.mark.parametrize("prompt", [[10**6], [-1], [5, 10**9]])
def test_tokens_outside_the_vocabulary_are_refused(llm: Any, prompt: list[int]) -> None:
    with pytest.raises(OptionError, match="vocabulary"):
        llm(prompt, max_tokens=2)


def test_a_stopping_criterion_ends_the_text(llm: Any) -> None:
    whole = llm(PROMPT, **GREEDY)
    result = llm(PROMPT, stopping_criteria=lambda ids, logits: len(ids) >= 8, **GREEDY)
    assert result["usage"]["completion_tokens"] == 3 and result["choices"][0]["finish_reason"] == "stop"
    assert text(whole).startswith(text(result))


def test_the_prompt_cache_of_llama_cpp_works(llm: Any) -> None:
    from llama_cpp import LlamaRAMCache

    expected = text(llm(PROMPT, **GREEDY))
    llm.set_cache(LlamaRAMCache(capacity_bytes=1 << 26))
    try:
        assert text(llm(PROMPT, **GREEDY)) == expected
        llm("Quite another text", max_tokens=2)
        assert text(llm(PROMPT, **GREEDY)) == expected
        assert llm.cache.cache_size > 0
    finally:
        llm.set_cache(None)


def test_an_empty_prompt_begins_a_text(llm: Any) -> None:
    result = llm("", max_tokens=4, temperature=0)
    assert result["usage"] == {"prompt_tokens": 1, "completion_tokens": 4, "total_tokens": 5}
