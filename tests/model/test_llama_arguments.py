"""Every option of the Python API, right and wrong: words instead of raw errors, and the object goes on."""

from __future__ import annotations

import inspect
import io
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from llama_harness import open_tiny

from h2o_gguf.checked import kinds_of
from h2o_gguf.errors import BudgetError, H2OError, OptionError

NAN, INF = float("nan"), float("inf")
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
HI = [{"role": "user", "content": "Hi"}]
NO_END = {token: -1000.0 for token in (2, 260, 261, 262)}  # the tiny vocabulary's control tokens
DEEP: dict[str, Any] = {}
DEEP["items"] = DEEP


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    build = {"chat_template": CHATML}
    with open_tiny("llama", tmp_path_factory.mktemp("model"), build=build, kv_budget=100) as opened:
        yield opened


def answers(llama: Any) -> bool:
    return bool(llama("abc", max_tokens=2, logit_bias=NO_END)["usage"]["completion_tokens"] == 2)


# -- the constructor ---------------------------------------------------------------------------------------

WRONG_TO_MAKE: list[tuple[str, Any]] = [
    ("model_path", None), ("model_path", 5), ("model_path", b"m.gguf"), ("model_path", "a\0b"),
    ("model_path", "\ud800"), ("policy", 5), ("policy", b"h2o"), ("policy", object()), ("policy", ""),
    ("kv_budget", 64.0), ("kv_budget", "64"), ("kv_budget", True), ("kv_budget", NAN), ("kv_budget", 2**40),
    ("heavy_ratio", NAN), ("heavy_ratio", "0.1"), ("recent_ratio", [0.1]), ("n_sink", "4"), ("n_recent", NAN),
    ("pin", 5), ("pin", "user"), ("pin", [5]), ("pin", [(1,)]), ("pin", [("a", 2)]),
    ("granularity", "banana"), ("granularity", 1), ("kv_block", 0), ("kv_block", NAN), ("kv_block", None),
    ("attention", "x"), ("attention", None), ("n_ctx", -1), ("n_ctx", "512"), ("n_ctx", None), ("n_ctx", 2.0),
    ("n_batch", 0), ("n_batch", "a"), ("n_batch", 4_000_000_000), ("n_ubatch", 1.5), ("n_threads", -1),
    ("n_threads", "2"), ("n_threads", 513), ("n_threads_batch", 1.5), ("n_gpu_layers", None),
    ("n_gpu_layers", "all"), ("n_gpu_layers", 2**40), ("flash_attn", "no"), ("flash_attn", None),
    ("type_k", 99), ("type_k", []), ("type_v", True), ("type_v", "q3_k"), ("seed", "x"), ("seed", NAN),
    ("seed", 1.5), ("logits_all", "yes"), ("embedding", 2), ("last_n_tokens_size", "x"),
    ("last_n_tokens_size", -5), ("last_n_tokens_size", 2**31 - 1), ("chat_format", "nope"),
    ("chat_format", 5), ("chat_handler", 5), ("draft_model", "x"), ("tokenizer", 5), ("lora_base", 5),
    ("lora_path", 5), ("lora_scale", "1"), ("lora_scale", NAN), ("numa", "x"), ("numa", 99), ("numa", None),
    ("spm_infill", "x"), ("verbose", "yes"), ("verbose", None), ("split_mode", "x"), ("split_mode", 9),
    ("main_gpu", "0"), ("main_gpu", 2**31), ("tensor_split", 5), ("tensor_split", ["a"]),
    ("tensor_split", [NAN]), ("tensor_split", "0.5"), ("vocab_only", None), ("use_mmap", "x"),
    ("use_mlock", 3), ("kv_overrides", 5), ("kv_overrides", {"a": None}),
    ("kv_overrides", {"a": "x" * 128}), ("kv_overrides", {"a": 2**63}),
    ("kv_overrides", {"k" * 128: 1}), ("offload_kqv", "x"), ("op_offload", "x"), ("swa_full", "x"),
    ("no_perf", None), ("rope_scaling_type", 99), ("pooling_type", 77), ("pooling_type", "mean"),
    ("attention_type", 2), ("rope_freq_base", NAN), ("rope_freq_base", "x"), ("rope_freq_base", -1.0),
    ("rope_freq_scale", INF), ("yarn_ext_factor", NAN), ("yarn_attn_factor", "x"), ("yarn_beta_fast", INF),
    ("yarn_beta_slow", NAN), ("yarn_orig_ctx", -4), ("kv_bugdet", 64),
]  # fmt: skip


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Opens a model that native code must not see."""
    from h2o_gguf import H2OLlama, loading

    path = tmp_path / "llama.gguf"
    open_tiny("llama", tmp_path, kv_budget=64).close()

    def touched(*_: Any) -> None:
        raise AssertionError("native code was called")

    monkeypatch.setattr(loading, "open_model", touched)
    return lambda **options: H2OLlama(**{"model_path": path, **options})


@pytest.mark.parametrize(("name", "value"), WRONG_TO_MAKE, ids=repr)
def test_a_wrong_option_is_refused_before_native_code_is_called(
    untouched: Any, name: str, value: Any
) -> None:
    with pytest.raises(OptionError) as caught:
        untouched(**{name: value})
    assert name in caught.value.options and name in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"n_ctx": np.int64(200), "n_batch": np.uint16(32), "kv_budget": np.uint8(99), "kv_block": np.int8(4)},
        {"heavy_ratio": np.float32(0.2), "recent_ratio": np.float64(0.2), "n_sink": np.int32(2)},
        {"kv_budget": 200, "n_recent": np.uint8(180), "n_sink": np.uint8(20), "pin": np.zeros((0, 2), int)},
        {"seed": np.int64(5), "n_threads": np.int32(1), "n_gpu_layers": np.int8(0)},
        {"type_k": np.int32(8), "type_v": "Q8_0", "rope_freq_base": np.float32(10000), "yarn_orig_ctx": 0},
        {"flash_attn": np.bool_(1), "verbose": 0, "numa": False, "tensor_split": np.ones(1)},
        {"policy": None, "seed": None, "pin": None, "granularity": None, "n_batch": None, "n_ubatch": None,
         "n_threads": None, "n_threads_batch": None, "chat_format": None, "chat_handler": None,
         "draft_model": None, "tokenizer": None, "lora_base": None, "lora_path": None, "type_k": None,
         "type_v": None, "kv_budget": None, "heavy_ratio": None, "recent_ratio": None, "n_sink": None,
         "n_recent": None, "tensor_split": None, "kv_overrides": None, "op_offload": None, "swa_full": None,
         "rope_scaling_type": None},
        {"seed": -1, "chat_format": "chatml", "pooling_type": -1, "split_mode": 1, "n_gpu_layers": -1},
        {"seed": 2**70, "kv_overrides": {"llama.rope.freq_base": 5000.0}},
        {"chat_format": "chat_template.default"},
    ],
)  # fmt: skip
def test_right_options_in_every_shape_are_accepted(options: dict[str, Any], tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, build={"chat_template": CHATML}, **options) as llama:
        assert llama("abcdefgh" * 24, max_tokens=2)["usage"]["prompt_tokens"] == 193
        assert all(type(n) is int for n in (llama.n_threads, llama.n_batch, llama._seed))


def test_a_path_may_be_a_path_and_a_copy_is_made_with_the_same_options(tmp_path: Path) -> None:
    import copy

    from h2o_gguf import H2OLlama

    open_tiny("llama", tmp_path).close()
    with H2OLlama(tmp_path / "llama.gguf", n_threads=1, kv_budget=np.int64(50), pin=[(0, 2)]) as llama:
        assert llama.model_path == str(tmp_path / "llama.gguf")
        with copy.copy(llama) as other:
            assert other.kv_report().budget == 50


def test_a_format_registered_by_the_user_counts(tmp_path: Path) -> None:
    from llama_cpp import llama_chat_format

    registry = llama_chat_format.LlamaChatCompletionHandlerRegistry()
    seen: list[Any] = []
    registry.register_chat_completion_handler("mine", lambda **options: seen.append(options["messages"]))
    try:
        with open_tiny("llama", tmp_path, chat_format="mine") as llama:
            parts = [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]
            llama.create_chat_completion(parts)
            assert seen == [parts], "and gets what is no text, too"
    finally:
        registry.unregister_chat_handler("mine")


# -- completions -------------------------------------------------------------------------------------------

WRONG_TO_COMPLETE: list[tuple[str, Any]] = [
    ("prompt", None), ("prompt", 5), ("prompt", b"abc"), ("prompt", ["a"]), ("prompt", [1.5]),
    ("prompt", [True]), ("prompt", {"a": 1}), ("prompt", "\ud800"), ("prompt", [10**9]), ("suffix", 5),
    ("suffix", b"x"), ("max_tokens", "3"), ("max_tokens", NAN), ("max_tokens", 2.5), ("max_tokens", True),
    ("temperature", None), ("temperature", "x"), ("temperature", NAN), ("temperature", 1e300),
    ("top_p", NAN), ("min_p", None), ("typical_p", "1"), ("logprobs", "x"), ("logprobs", -1),
    ("logprobs", True), ("logprobs", 2.5), ("echo", "no"), ("echo", None), ("stop", 5), ("stop", [b"x"]),
    ("stop", b"x"), ("stop", {"a": 1}), ("stop", [None]), ("frequency_penalty", None),
    ("presence_penalty", "x"), ("repeat_penalty", 0), ("repeat_penalty", -1), ("repeat_penalty", INF),
    ("top_k", 1.5), ("top_k", None), ("top_k", 2**40), ("stream", "yes"), ("seed", "x"), ("seed", 1.5),
    ("tfs_z", "x"), ("mirostat_mode", 3), ("mirostat_mode", "2"), ("mirostat_tau", NAN),
    ("mirostat_eta", None), ("model", 5), ("stopping_criteria", 5), ("logits_processor", 5),
    ("logits_processor", [5]), ("grammar", 5), ("grammar", SimpleNamespace(_grammar=5, _root="root")),
    ("grammar", 'root ::= "a"{5,2}'), ("grammar", "root ::= " + "(" * 200_000 + ")" * 200_000),
    ("grammar", 'root ::= "a"{3000}'), ("grammar", "root ::= ("), ("grammar", "\ud800"),
    ("logit_bias", {"x": 1}), ("logit_bias", [1]), ("logit_bias", {5: NAN}), ("logit_bias", {5: INF}),
    ("logit_bias", {10**6: 1}), ("pin", 5), ("pin", [(0, "a")]), ("progress", 5), ("cancel", 5),
    ("max_tokns", 3),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("name", "value"), WRONG_TO_COMPLETE, ids=lambda value: repr(value)[:40])
def test_a_wrong_option_of_a_completion_is_refused_and_the_object_goes_on(
    llama: Any, name: str, value: Any, stream: bool
) -> None:
    with pytest.raises(OptionError) as caught:
        result = llama(**{"prompt": "abc", "max_tokens": 2, "stream": stream, name: value})
        list(result)
    assert name in caught.value.options and len(str(caught.value)) < 1000
    assert answers(llama)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt": np.array([1, 70, 71])},
        {"prompt": (1, np.int32(70))},
        {"max_tokens": np.int64(2), "temperature": np.float32(0.5), "top_k": np.int32(9)},
        {"temperature": 1, "top_p": 1, "min_p": 0, "typical_p": 1, "repeat_penalty": 1, "seed": -1},
        {"stop": "x"},
        {"stop": ["x", "y"]},
        {"stop": ("x",)},
        {"stop": [""]},
        {"logit_bias": {"5": 1, 6: -INF, np.int64(7): np.float32(0.5)}},
        {"grammar": 'root ::= "ab" | "cd"'},
        {"grammar": ""},
        {"logprobs": 0},
        {"echo": 1, "stream": 0},
        {"logits_processor": lambda ids, logits: logits},
        {"pin": np.array([[0, 2]])},
        {"seed": 2**100},
    ],
)  # fmt: skip
def test_right_options_of_a_completion_are_accepted(llama: Any, options: dict[str, Any]) -> None:
    result = llama(**{"prompt": "abc", "max_tokens": 2, **options})
    assert result["usage"]["completion_tokens"] <= 2


@pytest.mark.parametrize("max_tokens", [None, 0, -1])
def test_no_limit_is_said_in_three_ways(llama: Any, max_tokens: int | None) -> None:
    result = llama("abc", max_tokens=max_tokens, temperature=0, stop="never", seed=1)
    assert result["choices"][0]["finish_reason"] in ("stop", "length")


def test_everything_llama_cpps_server_passes_is_accepted(llama: Any) -> None:
    common: dict[str, Any] = {
        "model": None, "max_tokens": 2, "temperature": 0.8, "top_p": 0.95, "min_p": 0.05, "stop": None,
        "stream": False, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": None, "seed": None,
        "top_k": 40, "repeat_penalty": 1.1, "mirostat_mode": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
        "grammar": None,
    }  # fmt: skip
    assert llama(prompt="abc", suffix=None, echo=False, logprobs=None, **common)["choices"]
    chat = llama.create_chat_completion(
        messages=HI, functions=None, function_call=None, tools=None, tool_choice=None, logprobs=False,
        top_logprobs=None, response_format=None, **common,
    )  # fmt: skip
    assert chat["choices"]


def test_a_grammar_as_text_is_obeyed(llama: Any) -> None:
    for seed in range(3):
        result = llama("a", grammar='root ::= "yes" | "no"', temperature=2.0, seed=seed)
        assert result["choices"][0]["text"] in ("yes", "no")


@pytest.mark.parametrize(
    ("method", "name", "value"),
    [
        ("sample", "temp", None), ("sample", "top_k", 1.5), ("sample", "idx", "0"), ("sample", "grammar", 5),
        ("sample", "grammar", 'root ::= "a"{5,2}'), ("sample", "penalize_nl", "x"),
        ("sample", "temprature", 1), ("generate", "tokens", "abc"), ("generate", "tokens", 5),
        ("generate", "tokens", [1.5]), ("generate", "temp", "x"), ("generate", "reset", "x"),
        ("generate", "stopping_criteria", 5),
        ("eval", "tokens", "abc"), ("eval", "tokens", [None]), ("set_seed", "seed", "x"),
    ],
)  # fmt: skip
def test_a_wrong_option_of_the_token_level_is_refused_and_the_object_goes_on(
    llama: Any, method: str, name: str, value: Any
) -> None:
    llama.eval(np.array([70, 71]))
    options = {"tokens": [70]} if method == "generate" else {}
    with pytest.raises(OptionError) as caught:
        result = getattr(llama, method)(**{**options, name: value})
        next(result)
    assert name in caught.value.options
    assert answers(llama) and isinstance(llama.sample(temp=np.float32(0)), int)
    assert isinstance(next(llama.generate((70, np.int64(71)), top_k=np.int8(1))), int)


# -- chats -------------------------------------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHOICE = {"type": "function", "function": {"name": "f"}}
WRONG_TO_CHAT: list[tuple[str, Any]] = [
    ("messages", None), ("messages", "hi"), ("messages", 5), ("messages", ["hi"]), ("messages", [{}]),
    ("messages", [{"role": None, "content": "a"}]), ("messages", [{"role": "user", "content": 5}]),
    ("messages", [{"role": "user", "content": ["a"]}]), ("messages", [{"role": "user", "content": [{}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": [{"type": "text", "text": None}]}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
    ("messages", [{"role": "user", "content": "\ud800"}]),
    ("functions", 5), ("functions", [{}]), ("function_call", "maybe"), ("function_call", {"name": "f"}),
    ("tools", 5), ("tools", [{}]), ("tools", [{"function": {"name": 5}}]),
    ("tools", [{"function": {"name": "f", "parameters": DEEP}}]), ("tool_choice", "maybe"),
    ("tool_choice", CHOICE), ("tool_choice", {"function": {}}), ("temperature", None), ("top_k", 1.5),
    ("stop", 5), ("seed", "x"), ("max_tokens", "3"), ("logprobs", "x"), ("top_logprobs", -1), ("grammar", 5),
    ("response_format", 5), ("response_format", {}), ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_object", "schema": 5}),
    ("response_format", {"type": "json_object", "schema": DEEP}),
    ("response_format", {"type": "json_object", "schema": {"minLength": 5, "maxLength": 2}}),
    ("response_format", {"type": "json_object", "schema": {"type": "array", "items": {}, "minItems": 10**9}}),
    ("response_format", {"type": "json_object", "schema": {"pattern": "^]$"}}),
    ("n", 2),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG_TO_CHAT, ids=lambda value: repr(value)[:60])
def test_a_wrong_option_of_a_chat_is_refused_and_the_object_goes_on(
    llama: Any, name: str, value: Any
) -> None:
    with pytest.raises(OptionError) as caught:
        llama.create_chat_completion(**{"messages": HI, "max_tokens": 2, name: value})
    assert name in caught.value.options
    assert llama.create_chat_completion(HI, max_tokens=2)["choices"]


def test_a_chosen_tool_must_be_there_and_have_parameters(llama: Any) -> None:
    bare = {"type": "function", "function": {"name": "f"}}
    for tools, words in [([TOOL], "one of the tools .f."), ([bare], "has no parameters")]:
        choice = {"function": {"name": "f" if tools == [bare] else "g"}}
        with pytest.raises(OptionError, match=words) as caught:
            llama.create_chat_completion(HI, tools=tools, tool_choice=choice)
        assert caught.value.options == ("tool_choice", "tools")
    reply = llama.create_chat_completion(HI, tools=[TOOL], tool_choice=CHOICE, max_tokens=3)
    assert reply["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_a_format_set_later_is_checked_when_it_is_used(llama: Any) -> None:
    before, llama.chat_format = llama.chat_format, "nope"
    try:
        with pytest.raises(OptionError, match=r"chat_format is 'nope': .* chat_template.default, alpaca"):
            llama.create_chat_completion(HI)
    finally:
        llama.chat_format = before


@pytest.mark.parametrize("length", [1, 50])
def test_the_longest_schema_of_a_text_is_obeyed(llama: Any, length: int) -> None:
    schema = {"type": "string", "minLength": length, "maxLength": length + 1000}
    reply = llama.create_chat_completion(
        HI, response_format={"type": "json_object", "schema": schema}, max_tokens=10, temperature=0
    )
    assert reply["choices"][0]["message"]["content"].startswith('"')


# -- summaries and sessions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("document", "text"), ("instruction", None), ("question", 5), ("system", b"x"), ("sampling", {}),
        ("seed", "x"), ("max_tokens", "3"), ("pin", 5), ("template", "x"), ("progress", 5), ("on_text", 5),
        ("cancel", 5), ("n_tokens", 1),
    ],
)  # fmt: skip
def test_a_wrong_option_of_a_summary_is_refused_and_the_object_goes_on(
    llama: Any, name: str, value: Any
) -> None:
    from h2o_gguf.documents import Document
    from h2o_gguf.summarize import summarize

    options = {"document": Document(io.BytesIO(b"abc"), "d", None), "instruction": "a", "question": "b"}
    with pytest.raises(OptionError) as caught:
        summarize(llama, **{**options, name: value})
    assert name in caught.value.options
    assert summarize(llama, **options, max_tokens=np.int64(2), seed=np.uint8(1)).n_written <= 2


def test_a_wrong_option_of_a_session_is_refused(llama: Any) -> None:
    from h2o_gguf.chat import ChatSession

    for name, value in [("system", 5), ("sampling", "x"), ("seed", 1.5), ("max_tokens", "3"), ("pin", 5)]:
        with pytest.raises(OptionError, match=f"{name} is "):
            ChatSession(llama, **{name: value})


# -- nothing is forgotten ----------------------------------------------------------------------------------


def checked_functions() -> dict[str, Any]:
    from h2o_gguf import H2OLlama
    from h2o_gguf.chat import ChatSession
    from h2o_gguf.sampling import SamplingOptions
    from h2o_gguf.summarize import summarize

    methods = ("create_completion", "create_chat_completion", "sample", "generate", "eval", "set_seed")
    return {
        "H2OLlama": H2OLlama.__init__,
        **{name: getattr(H2OLlama, name) for name in methods},
        "summarize": summarize,
        "ChatSession": ChatSession.__init__,
        "SamplingOptions": SamplingOptions,
    }


ANYTHING = {"llm", "rpc_servers", "mul_mat_q"}


def test_every_option_has_a_kind_that_refuses_some_object(llama: Any) -> None:
    """A new option whose annotation checks nothing fails here."""
    for what, function in checked_functions().items():
        takes_self = "self" in inspect.signature(function).parameters
        for name in kinds_of(function).keys() - ANYTHING:
            needed = [
                other
                for other, parameter in inspect.signature(function).parameters.items()
                if parameter.default is parameter.empty and other not in (name, "self", "options")
            ]
            args = [llama] if takes_self else []
            with pytest.raises(OptionError, match=rf"\b{name} is <object") as caught:
                function(*args, **{**dict.fromkeys(needed), name: object()})
            assert name in caught.value.options, f"{name} of {what}"


@pytest.mark.parametrize(
    "name", ["create_completion", "create_chat_completion", "sample", "generate", "eval"]
)
def test_signatures_begin_as_llama_cpps_with_the_same_defaults(name: str) -> None:
    import llama_cpp

    from h2o_gguf import H2OLlama

    ours = inspect.signature(getattr(H2OLlama, name)).parameters
    theirs = inspect.signature(getattr(llama_cpp.Llama, name)).parameters
    ours_first = [p for p in ours.values() if p.kind is not p.KEYWORD_ONLY]
    assert [p.name for p in ours_first] == [*theirs]
    unlike = {p.name for p in ours_first if p.default != theirs[p.name].default and p.name != "stop"}
    assert unlike <= ({"max_tokens"} if name == "create_completion" else set())


def test_the_constructor_takes_all_that_llama_cpps_takes() -> None:
    import llama_cpp

    from h2o_gguf import H2OLlama

    theirs = inspect.signature(llama_cpp.Llama.__init__).parameters.keys() - {"self", "kwargs"}
    assert theirs <= kinds_of(H2OLlama.__init__).keys()


# -- what kinds cannot say ---------------------------------------------------------------------------------


def test_an_encoder_tokenizes_and_says_why_it_cannot_generate(tmp_path: Path) -> None:
    with open_tiny("bert", tmp_path) as llama:
        assert llama.tokenize(b"abc")
        for call in (lambda: llama("abc"), lambda: llama.eval([5]), llama.sample):
            with pytest.raises(OptionError, match=r"'bert' model: .* encoder .* embedding=True"):
                call()


@pytest.mark.parametrize("n_batch", [300, 2**31 - 256])
def test_a_batch_too_large_beside_the_budget_is_told_what_fits(n_batch: int, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"lower n_batch to 192$"):
        open_tiny("llama", tmp_path, kv_budget=64, n_batch=n_batch)
    with pytest.raises(BudgetError, match=r"lower kv_budget to 156, or n_batch to 56$"):
        open_tiny("llama", tmp_path, kv_budget=200, n_batch=100)


class Own:
    """A policy whose parts the tests replace."""

    budget: Any = 64
    n_sink: Any = 0
    n_recent: Any = 8
    needs_scores = True
    decay = 1.0
    name = "none"

    def victims(self, view: Any, n: int) -> Any:
        evictable = view.evictable(self.n_sink, self.n_recent)
        order = np.argsort(np.where(evictable, view.pos, np.iinfo(np.int32).max), axis=-1)
        return order[..., :n].astype(np.int32)


def test_a_policy_called_none_that_evicts_evicts(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy=Own()) as llama:
        assert llama("abcdefgh" * 40, max_tokens=2)["kv"]["used"] == 64


def test_a_policys_small_integers_do_not_overflow(tmp_path: Path) -> None:
    own = Own()
    own.budget, own.n_sink, own.n_recent = np.uint8(64), np.int8(2), np.uint8(8)
    with open_tiny("llama", tmp_path, policy=own) as llama:
        assert llama("abcdefgh" * 60, max_tokens=2)["kv"]["used"] == 64


def test_a_call_from_inside_a_policy_says_so(tmp_path: Path) -> None:
    own = Own()
    with open_tiny("llama", tmp_path, policy=own) as llama:
        own.victims = lambda view, n: llama("abc")  # type: ignore[method-assign]
        with pytest.raises(H2OError, match="from inside one of its own calls"):
            list(llama("abcdefgh" * 40, max_tokens=2, stream=True))
