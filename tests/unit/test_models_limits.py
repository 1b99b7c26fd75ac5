"""Headers with absurd numbers are the file's fault, and are refused before native code sees them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models.headers import BASE, header

from h2o_gguf import models
from h2o_gguf.cache_options import CacheOptions
from h2o_gguf.errors import MODEL_FILE, H2OError, ModelFileError
from h2o_gguf.models.header import LongArray
from h2o_gguf.models.shape import shape_of
from h2o_gguf.sizes import plan_model_sizes

MORE_KEYS = (
    "attention.key_length", "attention.value_length", "attention.key_length_swa",
    "attention.sliding_window", "attention.sliding_window_pattern", "attention.shared_kv_layers",
    "attention.layer_norm_rms_epsilon", "attention.recurrent_layers", "attention.causal",
    "rope.dimension_count", "rope.dimension_sections", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "num_loops", "nextn_predict_layers", "full_attention_interval",
    "ssm.conv_kernel", "ssm.inner_size", "ssm.group_count", "ssm.state_size", "wkv.head_size",
    "shortconv.l_cache", "kda.head_dim", "expert_count", "expert_used_count", "expert_group_count",
    "leading_dense_block_count", "vocab_size",
)  # fmt: skip
KEYS = (*BASE, *MORE_KEYS)
ARCHITECTURES = (
    "llama", "gemma3", "gemma3n", "gemma4", "lfm2", "jamba", "qwen3next", "mamba", "rwkv7", "deepseek2",
    "nanbeige", "exaone4", "cohere2moe", "step35", "bert", "hunyuan-dense",
)  # fmt: skip
SCALARS = st.one_of(
    st.sampled_from(
        (0, -1, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, math.nan, math.inf, 1e300, "", "x")
    ),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
)
VALUES = st.one_of(
    SCALARS, st.tuples(*[SCALARS] * 12), st.just(()), st.just(LongArray(5000)), st.just(((1,),))
)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(ARCHITECTURES), st.sampled_from(KEYS), VALUES)
def test_any_value_gives_a_shape_or_a_model_file_error(arch: str, key: str, value: Any) -> None:
    made = header(arch)
    made = replace(made, metadata={**made.metadata, f"{arch}.{key}": value})
    try:
        shape = shape_of(made)
        sizes = plan_model_sizes(CacheOptions(None), shape)
        assert models.memory_bytes(shape, sizes.n_cells, sizes.n_ubatch).total >= 0
        plan_model_sizes(CacheOptions(), shape)
    except H2OError as error:
        assert error.exit_code == MODEL_FILE, error


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"context_length": 0}, "context_length is 0; 1 to 2,147,483,647"),
        ({"context_length": 0xFFFFFFFF}, "context_length is 4294967295"),
        ({"block_count": 0}, "block_count is 0; 1 to 512"),
        ({"block_count": 513}, "block_count is 513"),
        ({"embedding_length": 0}, "embedding_length is 0"),
        ({"attention__head_count": 1 << 17}, "head_count is 131072"),
        ({"attention__head_count_kv": (2,) * 11}, "11 values for 12 layers"),
        ({"attention__key_length": 1 << 20}, "key_length is 1048576"),
        ({"rope__dimension_count": 0}, "rotates 0 of the 64 values"),
        ({"rope__dimension_count": 65}, "rotates 65 of the 64 values"),
        ({"attention__layer_norm_rms_epsilon": math.nan}, "epsilon is nan"),
        ({"attention__layer_norm_rms_epsilon": -1.0}, "epsilon is -1.0"),
        ({"expert_count": 8}, "uses 0 of its 8 experts"),
        ({"expert_used_count": 2}, "uses 2 of its 0 experts"),
        ({"expert_count": 8, "expert_used_count": 2, "expert_group_count": 3}, "cannot form 3 groups"),
        ({"rope__scaling__type": "su"}, "type is 'su', known are none, linear, yarn, longrope"),
    ],
)
def test_absurd_numbers_are_refused_by_name(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        shape_of(header("llama", **keys))


@pytest.mark.parametrize(
    "keys",
    [
        {"expert_count": 8, "expert_used_count": 2},
        {
            "expert_count": 8,
            "expert_used_count": (2,) * 12,
            "expert_group_count": 4,
            "expert_group_used_count": 2,
        },
        {"rope__scaling__type": "yarn"},
        {"rope__scaling__original_context_length": 0},
        {"rope__dimension_count": 32},
        {"attention__layer_norm_rms_epsilon": 0.0},
    ],
)
def test_numbers_real_models_have_are_taken(keys: dict[str, Any]) -> None:
    assert shape_of(header("llama", **keys)).n_ctx_orig == 4096


@pytest.mark.parametrize("n_ctx", [16, 20, 36, 100])
def test_a_short_context_is_planned_for(n_ctx: int) -> None:
    sizes = plan_model_sizes(CacheOptions(), shape_of(header("llama", context_length=n_ctx)))
    assert sizes.policy is not None and sizes.policy.budget + sizes.n_ubatch <= n_ctx


def test_a_context_too_short_to_evict_in_is_said() -> None:
    verdict = models.support(shape_of(header("llama", context_length=15)))
    assert not verdict.can_evict and "context of 15 tokens" in verdict.reason
