"""What the options of the Python API can be, beyond numbers and texts: one declaration for signatures, checks
and error texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from gguf.constants import GGMLQuantizationType
from pydantic import AfterValidator, ConfigDict, with_config
from typing_extensions import NotRequired, TypedDict

from h2o_gguf.kinds import (
    FLOAT32_MAX,
    FLOAT32_TINY,
    Count,
    Int32,
    Listed,
    Made,
    Must,
    Number,
    Real,
    Spans,
    Switch,
    Text,
    Tokens,
    Whole,
    scalar,
    utf8,
)
from h2o_gguf.models.memory import CACHE_TYPES, MAX_CELLS
from h2o_gguf.policies import is_policy
from h2o_gguf.schemas import check_schema

KV_TYPES = {name: int(GGMLQuantizationType[name.upper()]) for name in CACHE_TYPES}
MAX_THREADS = 512  # what ggml takes
MAX_PENALIZED = 1 << 24  # tokens; llama.cpp allocates room for all of them
OVERRIDE_BYTES = 127  # of a key or a text: llama.cpp's 128 with the NUL


def _require(fits: bool) -> None:
    if not fits:
        raise ValueError


def _policy(value: Any) -> Any:
    _require(isinstance(value, str) or is_policy(value))
    return value


def _tokenizer(value: Any) -> Any:
    _require(all(callable(getattr(value, name, None)) for name in ("tokenize", "detokenize")))
    return value


def _grammar(value: Any) -> Any:
    has_both = hasattr(value, "_grammar") and hasattr(value, "_root")
    texts = (value._grammar, value._root) if has_both else (value,)
    _require(all(isinstance(text, str) and utf8(text) == text for text in texts))
    return value


def _cache_type(value: Any) -> int:
    value = scalar(value)
    number = KV_TYPES.get(value.lower(), -1) if isinstance(value, str) else value
    _require(type(number) is int and number in KV_TYPES.values())
    return int(number)


def _token(value: Any) -> int:
    """A token as a key; in JSON keys are texts."""
    value = int(value) if isinstance(value, str) and value.isdecimal() else scalar(value)
    _require(type(value) is int)
    return int(value)


def _bias(value: Any) -> float:
    """-inf forbids a token; +inf would leave no probabilities."""
    value = scalar(value)
    _require(isinstance(value, int | float) and not isinstance(value, bool) and value <= FLOAT32_MAX)
    return float(value) if value >= -FLOAT32_MAX else -math.inf


def _override_key(value: Any) -> str:
    _require(isinstance(value, str) and len(value.encode()) <= OVERRIDE_BYTES)
    return str(value)


def _override(value: Any) -> Any:
    value = scalar(value)
    if isinstance(value, str):
        return _override_key(value)
    _require(isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**63))
    return value


def _numa(value: Any) -> int:
    value = scalar(value)
    _require(isinstance(value, int) and 0 <= value <= 4)
    return int(value)


# -- what a completion takes -------------------------------------------------------------------------------

Prompt = Annotated[Text | Tokens, Must("valid text or a list of tokens")]
RepeatPenalty = Annotated[float, Real(FLOAT32_TINY, "a number of 32 bits above 0 (1 is off)")]
PenaltyWindow = Annotated[int, Whole(0, MAX_PENALIZED, " (tokens; 0 is off)")]
Mirostat = Annotated[int, Whole(0, 2, " (0 is off)")]
Bias = Annotated[
    Mapping[Annotated[Any, Made(_token, "")], Annotated[float, Made(_bias, "")]],
    Must("a mapping from tokens to numbers, -inf among them"),
]
Grammar = Annotated[Any, Made(_grammar, "GBNF text or a LlamaGrammar")]
Processors = Annotated[
    Callable[..., Any] | Annotated[Sequence[Callable[..., Any]], Listed],
    Must("a function of (tokens, logits) or a list of such functions"),
]

# -- what a chat takes -------------------------------------------------------------------------------------

OPEN = ConfigDict(extra="allow")  # templates read more of a message than is known here
Schema = Annotated[dict[str, Any], AfterValidator(check_schema)]


def _part(part: Any) -> Any:
    _require(part["type"] != "text" or "text" in part)
    return part


@with_config(OPEN)
class Part(TypedDict):
    """A part of a message: text, or what a chat_handler can read."""

    type: Text
    text: NotRequired[Text]


@with_config(OPEN)
class Message(TypedDict):
    """A message of a chat."""

    role: Text
    content: NotRequired[
        Annotated[
            Text | list[Annotated[Part, AfterValidator(_part)]] | None,
            Must("valid text, None, or a list of parts, such as dict(type='text', text='Hello')"),
        ]
    ]


@with_config(OPEN)
class Function(TypedDict):
    """A function the model may call."""

    name: Text
    parameters: NotRequired[Schema | None]


@with_config(OPEN)
class Tool(TypedDict):
    """A tool the model may call."""

    function: Function


@with_config(OPEN)
class NamedFunction(TypedDict):
    """The function the model shall call."""

    name: Text


@with_config(OPEN)
class NamedTool(TypedDict):
    """The tool the model shall call."""

    function: NamedFunction


@with_config(OPEN)
class ResponseFormat(TypedDict):
    """What the reply is written in."""

    type: Annotated[
        Literal["text", "json_object"], Must("'text' or 'json_object', which may go with a 'schema'")
    ]
    schema: NotRequired[Schema | None]


Messages = Annotated[Sequence[Message], Listed]
Functions = Annotated[Sequence[Function], Listed]
Tools = Annotated[Sequence[Tool], Listed]
FunctionCall = Annotated[Literal["none", "auto"] | NamedFunction, Must("'none', 'auto' or dict(name=...)")]
ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    Must("'none', 'auto', 'required' or dict(type='function', function=dict(name=...))"),
]

# -- what the constructor takes ----------------------------------------------------------------------------

PolicyChoice = Annotated[
    Any, Made(_policy, "a name, or an object with a budget and a method victims(view, n)")
]
LayerBudgetsChoice = Annotated[
    Text | Annotated[Sequence[Annotated[int, Whole(1, MAX_CELLS)]], Listed],
    Must("'pyramid', 'pyramid:BETA', the file of a calibration, or a list of budgets, one for each layer"),
]
Pin = Annotated[
    Literal["system"] | Spans, Must("'system' or a list of spans of positions, such as [(0, 40)]")
]
Granularity = Annotated[Literal["head", "layer", "token"], Must("'head', 'layer' or 'token'")]
Attention = Annotated[
    Literal["auto", "fused", "composed", "reference"], Must("'auto', 'fused', 'composed' or 'reference'")
]
ContextSize = Annotated[int, Whole(0, MAX_CELLS, " (0: the model's)")]
BatchSize = Annotated[int, Whole(1, MAX_CELLS)]
AtticPlace = Annotated[Literal["ram", "disk", "off"], Must("'ram', 'disk' or 'off'")]
AtticBytes = Annotated[int, Whole(1, 2**62, " (bytes)")]
Threads = Annotated[int, Whole(0, MAX_THREADS, " (0: the physical cores)")]
GpuLayers = Annotated[int, Whole(note=" (-1: all layers)")]
CacheType = Annotated[int | str, Made(_cache_type, f"{', '.join(KV_TYPES)}, or llama.cpp's number for it")]
Numa = Annotated[bool | int, Made(_numa, "True, False, or the number of a strategy, 0 to 4")]
Tokenizer = Annotated[Any, Made(_tokenizer, "an object with the methods tokenize and detokenize")]
NumberOfModel = Annotated[float, Real(0.0, "a finite number, 0 or more (0: the model's)")]
Shares = Annotated[Sequence[Number], Listed, Must("a list of numbers")]
Overrides = Annotated[
    Mapping[Annotated[str, Made(_override_key, "")], Annotated[Any, Made(_override, "")]],
    Must(
        "a mapping from keys to bools, whole numbers of 64 bits, numbers or texts, "
        f"with keys and texts of at most {OVERRIDE_BYTES} bytes"
    ),
]


class ModelKeywords(TypedDict, total=False):
    """Options of llama_cpp.Llama that belong to the model."""

    split_mode: Annotated[int, Whole(0, 3, ": one GPU, layers, rows or tensors")]
    main_gpu: Int32
    tensor_split: Shares | None
    vocab_only: Switch
    use_mmap: Switch
    use_mlock: Switch
    kv_overrides: Overrides | None


class ContextKeywords(TypedDict, total=False):
    """Options of llama_cpp.Llama that belong to the context; None is the model's choice."""

    offload_kqv: Switch
    op_offload: Switch | None
    swa_full: Switch | None
    no_perf: Switch
    rope_scaling_type: Annotated[int, Whole(-1, 3, ": the model's, none, linear, YaRN or LongRoPE")] | None
    pooling_type: Annotated[int, Whole(-1, 4, ": the model's, none, mean, CLS, last or rank")] | None
    attention_type: Annotated[int, Whole(-1, 1, ": the model's, causal or not causal")] | None
    rope_freq_base: NumberOfModel | None
    rope_freq_scale: NumberOfModel | None
    yarn_ext_factor: Number | None
    yarn_attn_factor: Number | None
    yarn_beta_fast: Number | None
    yarn_beta_slow: Number | None
    yarn_orig_ctx: Count | None


class LlamaKeywords(ModelKeywords, ContextKeywords, total=False):
    """Options of llama_cpp.Llama that H2OLlama passes on, and two that its server passes to every model,
    though llama.cpp no longer has them.
    """

    rpc_servers: Any
    mul_mat_q: Any
