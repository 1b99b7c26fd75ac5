"""What the constructor accepts and refuses, on many kinds of models."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_harness import open_llama, open_tiny

from h2o_gguf.cli.weighing import Weight, weigh
from h2o_gguf.errors import (
    BudgetError,
    ContextOverflowError,
    ModelFileError,
    OptionError,
    PolicyError,
    UnsupportedModelError,
)
from h2o_gguf.models import read_shape
from h2o_gguf.policies import H2O

NO_END = {token: -1000.0 for token in (2, 260, 261, 262)}  # the tiny vocabulary's control tokens


def test_a_quantized_v_without_flash_attention_is_refused_with_both_names(tmp_path: Path) -> None:
    with pytest.raises(OptionError) as caught:
        open_tiny("llama", tmp_path, kv_budget=100, type_v="q8_0", flash_attn=False)
    assert caught.value.options == ("type_v", "flash_attn")
    assert "type_v" in str(caught.value) and "flash_attn" in str(caught.value)


@pytest.mark.parametrize("flash_attn", [True, False])
@pytest.mark.parametrize("type_k", ["f16", "q8_0", 8, "f32"])
def test_cache_types_go_by_name_and_number(type_k: Any, flash_attn: bool, tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, kv_budget=64, type_k=type_k, flash_attn=flash_attn) as llama:
        assert llama("abcdefgh" * 30, max_tokens=4)["kv"]["used"] == 64


def test_unknown_options_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="kv_bugdet"):
        open_tiny("llama", tmp_path, kv_bugdet=100)
    with pytest.raises(OptionError, match="type_k"):
        open_tiny("llama", tmp_path, type_k="q3_k")
    with pytest.raises(OptionError, match="pin"):
        open_tiny("llama", tmp_path, pin="user")
    with pytest.raises(OptionError, match="h3o"):
        open_tiny("llama", tmp_path, policy="h3o")


@pytest.mark.parametrize("n_sink", [62, 63, 64, 100])
def test_sinks_close_to_the_budget_run_or_are_refused(n_sink: int, tmp_path: Path) -> None:
    try:
        llama = open_tiny("llama", tmp_path, kv_budget=64, n_sink=n_sink)
    except BudgetError as error:
        assert n_sink == 100 and error.n_sink == 100 and error.budget == 64
        return
    with llama:
        result = llama("abcdefgh" * 40, max_tokens=20, logit_bias=NO_END)
        assert result["usage"]["completion_tokens"] == 20 and result["kv"]["used"] == 64


@pytest.mark.parametrize("policy", ["h2o+", "h2o", "streaming", "random"])
@pytest.mark.parametrize("granularity", [None, "head", "layer", "token"])
def test_every_policy_keeps_the_budget(policy: str, granularity: str | None, tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, kv_budget=48, policy=policy, granularity=granularity) as llama:
        result = llama("abcdefgh" * 60, max_tokens=80, temperature=1.0, seed=1, logit_bias=NO_END)
        assert result["kv"]["policy"] == policy and result["kv"]["used"] == 48
        assert result["kv"]["n_past"] == 481 + 79, "past the 256 positions the model knows"
        assert result["kv"]["n_rebases"] >= 1


def test_ratios_are_shares_of_the_context(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, n_ctx=200, heavy_ratio=0.1, recent_ratio=0.2) as llama:
        assert llama.kv_report().budget == 60 and llama.engine.policy.n_recent == 40
    with open_tiny("llama", tmp_path, n_ctx=200, heavy_ratio=0.01, recent_ratio=0.5) as llama:
        assert llama.kv_report().budget == 102 and llama.engine.policy.n_recent == 98


def test_by_default_a_text_goes_on_past_the_models_context(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path) as llama:
        result = llama("a" * 1000, max_tokens=10, logit_bias=NO_END)
        assert result["usage"]["completion_tokens"] == 10
        assert result["kv"]["policy"] == "h2o+" and result["kv"]["n_past"] == 1010
        assert result["kv"]["used"] <= result["kv"]["budget"] <= 256


def test_without_a_limit_generation_ends_after_as_many_tokens_as_the_model_was_trained_on(
    tmp_path: Path,
) -> None:
    with open_tiny("llama", tmp_path, kv_budget=64) as llama:
        result = llama("a", logit_bias=NO_END)
        assert result["usage"]["completion_tokens"] == 256
        assert result["choices"][0]["finish_reason"] == "length"


def test_learned_positions_end_the_text_at_the_models_context(tmp_path: Path) -> None:
    with open_tiny("gpt2", tmp_path, kv_budget=64) as llama:
        assert llama.n_ctx() == 256
        with pytest.raises(ContextOverflowError):
            llama("a" * 300)
        result = llama("a" * 200, logit_bias=NO_END)
        assert result["choices"][0]["finish_reason"] == "length"
        assert result["usage"]["total_tokens"] == 256 and result["kv"]["used"] == 64


def test_a_model_without_a_cache_is_refused_only_if_eviction_was_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UnsupportedModelError, match="mamba"):
        open_tiny("mamba", tmp_path, kv_budget=64)
    with caplog.at_level(logging.WARNING), open_tiny("mamba", tmp_path) as llama:
        assert llama("abc", max_tokens=3)["kv"]["policy"] == "none"
    assert "nothing will be evicted" in caplog.text


@pytest.mark.parametrize(
    "architecture", ["qwen2", "gemma3", "gemma2", "phi3", "jamba", "deepseek2", "qwen2vl"]
)
def test_other_architectures_evict_and_the_same_prompt_gives_the_same_text(
    architecture: str, tmp_path: Path
) -> None:
    with open_tiny(architecture, tmp_path, kv_budget=64) as llama:
        options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "logit_bias": NO_END}
        texts = []
        for _ in range(2):
            result = llama("abcdefgh" * 20, **options)
            assert result["kv"]["used"] <= 64 and result["usage"]["completion_tokens"] == 12
            texts.append(result["choices"])
            llama("something else that is longer than the window " * 4, **options)
        assert texts[0] == texts[1]


@pytest.mark.parametrize("architecture", ["gemma3", "mamba", "jamba"])
def test_a_prompt_that_differs_late_gives_what_a_fresh_object_gives(
    architecture: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "logit_bias": NO_END}
    text = "the quick brown fox jumps over the lazy dog " * 3
    with open_tiny(architecture, tmp_path, policy="none") as used:
        used(text + "and on it goes to the very end", **options)
        again = used(text + "but not for ever", **options)
    with open_tiny(architecture, tmp_path, policy="none") as fresh:
        assert fresh(text + "but not for ever", **options)["choices"] == again["choices"]


@dataclass(frozen=True)
class Mine:
    budget: int = 64
    mistake: bool = False

    def victims(self, view: Any, n: int) -> Any:
        if self.mistake:
            raise ZeroDivisionError("mine")
        order = np.argsort(np.where(view.evictable(0, 0), view.pos, np.iinfo(np.int32).max), axis=-1)
        return order[..., :n].astype(np.int32)


def test_a_policy_of_ones_own_is_an_object_with_a_budget_and_victims(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy=Mine()) as llama:
        result = llama("abcdefgh" * 40, max_tokens=4)
        assert result["kv"]["policy"] == "Mine" and result["kv"]["used"] == 64
    with open_tiny("llama", tmp_path, policy=H2O(budget=40)) as llama:
        assert llama("abcdefgh" * 40, max_tokens=4)["kv"]["used"] == 40


def test_an_error_in_a_policy_surfaces_from_the_call_and_the_object_stays_usable(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, policy=Mine(mistake=True)) as llama:
        for _ in range(2):
            with pytest.raises(PolicyError, match="ZeroDivisionError: mine") as caught:
                llama("abcdefgh" * 40, max_tokens=4)
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
            assert llama("abc", max_tokens=4, temperature=0)["usage"]["completion_tokens"] == 4
            with pytest.raises(PolicyError):
                list(llama("abcdefgh" * 40, max_tokens=4, stream=True))


@pytest.mark.parametrize("content", [b"", b"GGUF", None])
def test_a_broken_file_is_refused_with_the_reason(
    content: bytes | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from h2o_gguf import H2OLlama

    good = tmp_path / "llama.gguf"
    open_tiny("llama", tmp_path, kv_budget=64).close()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(good.read_bytes()[: good.stat().st_size * 6 // 10] if content is None else content)
    capfd.readouterr()
    with pytest.raises(ModelFileError) as caught:
        H2OLlama(str(bad))
    assert str(bad) in str(caught.value) and caught.value.reason
    assert capfd.readouterr() == ("", "")


def test_a_catalog_name_is_no_path_and_the_error_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from h2o_gguf import H2OLlama

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFileError, match=r"h2o_gguf\.models\.resolve\('smollm2-135m'\)"):
        H2OLlama("smollm2-135m")


@pytest.mark.parametrize("path", ["missing.gguf", "."])
def test_a_missing_file_and_a_folder_are_refused(path: str, tmp_path: Path) -> None:
    from h2o_gguf import H2OLlama

    with pytest.raises(ModelFileError):
        H2OLlama(str(tmp_path / path))


def test_a_quiet_object_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    open_tiny("llama", tmp_path, kv_budget=64).close()
    capfd.readouterr()
    with open_tiny("llama", tmp_path, kv_budget=64) as llama:
        llama("abcdefgh" * 40, max_tokens=4)
        llama.cancel()
    assert capfd.readouterr() == ("", "")


def test_embedding_works_as_in_llama_cpp(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, embedding=True, pooling_type=1, n_ctx=256) as llama:
        one, two = llama.embed(["abc", "something else"])
        assert len(one) == llama.n_embd() and one != two
        response = llama.create_embedding("abc")
        assert response["object"] == "list" and np.allclose(response["data"][0]["embedding"], one, atol=1e-5)
        with pytest.raises(OptionError, match="embedding"):
            llama("abc")
    with open_tiny("llama", tmp_path) as llama, pytest.raises(OptionError, match="embedding=True"):
        llama.embed("abc")


def test_a_vocabulary_alone_tokenizes(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, vocab_only=True) as llama:
        assert llama.detokenize(llama.tokenize(b"abc")) == b"abc"
        with pytest.raises(OptionError, match="vocab_only"):
            llama("abc")


def test_the_options_of_llama_cpps_server_are_accepted(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "n_gpu_layers": 0, "split_mode": 1, "main_gpu": 0, "tensor_split": None, "vocab_only": False,
        "use_mmap": True, "use_mlock": False, "kv_overrides": None, "rpc_servers": None,
        "seed": 0xFFFFFFFF, "n_ctx": 128,
        "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1, "rope_scaling_type": -1,
        "rope_freq_base": 0.0, "rope_freq_scale": 0.0, "yarn_ext_factor": -1.0, "yarn_attn_factor": 1.0,
        "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_orig_ctx": 0, "mul_mat_q": True,
        "logits_all": False, "embedding": False, "offload_kqv": True, "flash_attn": False,
        "last_n_tokens_size": 64, "lora_base": None,
        "lora_path": None, "numa": False, "chat_format": None, "chat_handler": None, "draft_model": None,
        "type_k": None, "type_v": None, "tokenizer": None, "verbose": False,
    }  # fmt: skip
    with open_tiny("llama", tmp_path, **options) as llama:
        assert llama("abc" * 100, max_tokens=4)["kv"]["budget"] == 128


def test_overrides_of_metadata_reach_the_model(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, kv_overrides={"tokenizer.ggml.add_bos_token": False}) as llama:
        llama("abc", max_tokens=1)
        assert llama.engine.tokens[0] != llama.token_bos()
    with pytest.raises(OptionError, match="kv_overrides"):
        open_tiny("llama", tmp_path, kv_overrides={"x": "y" * 200})


RANGE = [16, 48, 64, 100, 192, 255, 256, 257, 500, 1000, 1024, 2048, 4000, 4096]


def inspected(llama_path: str, budget: int, n_ctx: int = 0) -> Weight:
    return weigh(read_shape(llama_path), budget, n_ctx, None, "f16", "f16")


@pytest.mark.parametrize("budget", RANGE)
def test_inspect_says_what_the_runtime_allocates(budget: int) -> None:
    with open_llama(kv_budget=budget) as llama:
        said = inspected(llama.model_path, budget)
        assert said.budget_bytes == llama.kv_report().bytes
        assert said.n_cells == llama.engine.context.n_cells and said.problem == ""


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("n_swa", [32, 240])
def test_inspect_of_small_and_windowed_models_is_the_runtimes_answer(
    architecture: str, n_swa: int, tmp_path: Path
) -> None:
    written = tmp_path / f"{architecture}.gguf"
    build: dict[str, Any] = {"n_swa": n_swa} if architecture == "gemma3" else {}
    for budget in RANGE:
        try:
            llama = open_tiny(architecture, tmp_path, build=build, kv_budget=budget)
        except BudgetError as error:
            said = inspected(str(written), budget)
            assert said.problem == str(error) and said.budget_bytes is said.n_cells is None
            continue
        with llama:
            assert inspected(str(written), budget).budget_bytes == llama.kv_report().bytes


@pytest.mark.parametrize("swa_full", [False, True])
@pytest.mark.parametrize("flash_attn", [False, True])
def test_bytes_without_eviction_are_those_of_the_windowed_layers_too(
    swa_full: bool, flash_attn: bool, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"swa_full": swa_full, "flash_attn": flash_attn, "n_batch": 32}
    build: dict[str, Any] = {"n_ctx_train": 1024}
    with open_tiny("gemma3", tmp_path, build=build, policy="none", **options) as llama:
        shape = read_shape(llama.model_path)
        n_windowed = sum(shape.swa_layers)
        cells = 1024 * (shape.n_layer - n_windowed) + (1024 if swa_full else 256) * n_windowed
        assert 0 < n_windowed < shape.n_layer
        assert llama.kv_report().bytes == cells * 2 * shape.n_head_kv[0] * shape.head_dim_k * 2


def test_parameters_are_those_of_create_completion_and_of_llama_cpps_embed(tmp_path: Path) -> None:
    import llama_cpp

    with open_tiny("llama", tmp_path) as llama:
        assert inspect.signature(llama) == inspect.signature(llama.create_completion)
        assert [*inspect.signature(llama.embed).parameters] == [
            *inspect.signature(llama_cpp.Llama.embed).parameters
        ][1:]


def test_a_window_larger_than_the_budget_gets_the_cells_it_needs(tmp_path: Path) -> None:
    with open_tiny("gemma3", tmp_path, build={"n_swa": 240}, kv_budget=32) as llama:
        result = llama("abcdefgh" * 40, max_tokens=20, logit_bias=NO_END)
        assert result["usage"]["completion_tokens"] == 20 and result["kv"]["used"] == 32
