"""eval, sample, generate and the arrays: what users of llama_cpp.Llama build on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llama_harness import english, open_llama

from h2o_gguf.errors import ContextOverflowError, OptionError
from h2o_gguf.evaluation import rows


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with open_llama(kv_budget=256) as llama:
        yield llama


@pytest.fixture(scope="module")
def tokens(llm: Any) -> list[int]:
    return list(llm.tokenize(english(8000).encode()))


def test_it_is_a_llama_cpp_llama(llm: Any) -> None:
    import llama_cpp

    assert isinstance(llm, llama_cpp.Llama)
    assert llm.n_vocab() == 49152 and llm.token_eos() == 2 and llm.n_embd() == 576
    assert llm.metadata["general.architecture"] == "llama"
    assert llm.tokenizer().encode("Hello") == llm.tokenize(b"Hello", special=True)


def test_eval_takes_any_number_of_tokens_and_stays_within_the_budget(llm: Any, tokens: list[int]) -> None:
    llm.reset()
    llm.eval(tokens[:1000])
    assert llm.n_tokens == 1000 and llm.input_ids.tolist() == tokens[:1000]
    assert llm.kv_report().used == 256
    llm.eval(tokens[1000:1100])
    assert list(llm.eval_tokens) == tokens[:1100] and llm.kv_report().used == 256


def test_n_ctx_has_no_end_with_eviction_and_is_the_limit_without(llm: Any) -> None:
    assert llm.n_ctx() == 2**31 - 1
    with open_llama(policy=None, n_ctx=100) as plain:
        assert plain.n_ctx() == 100
        with pytest.raises(ContextOverflowError):
            plain.eval([5] * 101)
        plain.eval([5] * 99)


def test_sample_reads_the_last_logits_and_changes_nothing(llm: Any) -> None:
    llm.reset()
    llm.eval(llm.tokenize(b"The capital of France is"))
    token = llm.sample(temp=0.0)
    assert llm.detokenize([token]) == b" Paris" and llm.sample(temp=0.0) == token
    assert llm.n_tokens == 5 and int(llm.scores[-1].argmax()) == token
    with pytest.raises(OptionError, match="logits_all"):
        llm.sample(temp=0.0, idx=2)


def test_generate_goes_on_for_ever_and_reuses_what_is_cached(llm: Any) -> None:
    llm.reset()
    prompt = llm.tokenize(b"One, two, three,")
    first = list(itertools.islice(llm.generate(prompt, temp=0), 400))
    assert len(first) == 400 and llm.kv_report().used <= 256
    again = list(itertools.islice(llm.generate(prompt, temp=0), 20))
    assert again[:10] == first[:10]


def test_what_is_sent_into_generate_is_read_after_the_token(llm: Any) -> None:
    llm.reset()
    prompt = llm.tokenize(b"Hello")
    stream = llm.generate(prompt, temp=0)
    token = next(stream)
    stream.send([100, 101])
    assert llm.input_ids.tolist() == [*prompt, token, 100, 101]
    stream.close()


def test_setting_n_tokens_back_is_a_rollback(llm: Any, tokens: list[int]) -> None:
    llm.reset()
    llm.eval(tokens[:500])
    expected = int(llm.scores[-1].argmax())
    llm.eval([5, 6, 7])
    llm.n_tokens = 499
    llm.eval(tokens[499:500])
    assert llm.input_ids.tolist() == tokens[:500]
    assert int(llm.scores[-1].argmax()) == expected


def test_setting_n_tokens_far_back_reads_the_rest_again(llm: Any, tokens: list[int]) -> None:
    llm.reset()
    llm.eval(tokens[:900])
    llm.n_tokens = 300
    assert llm.input_ids.tolist() == tokens[:300] and llm.kv_report().n_past == 300
    again = llm.scores[-1].copy()
    llm.reset()
    llm.eval(tokens[:300])
    assert np.array_equal(llm.scores[-1], again)


def test_a_rolled_back_cache_holds_exactly_what_it_held_before(llm: Any, tokens: list[int]) -> None:
    llm.reset()
    llm.eval(tokens[:600])
    cache = llm.engine.cache
    pos, keys = np.sort(cache.pos, axis=-1).copy(), cache.keys(3).copy()
    rows = np.take_along_axis(keys, np.argsort(cache.pos[3], axis=-1)[..., None], axis=1)
    llm.eval(tokens[600:620])
    assert llm.kv_report().used == 256
    assert llm.engine.rollback(600)
    kept = np.sort(cache.pos, axis=-1)
    assert llm.kv_report().used == 236, "twenty were evicted for the twenty that are gone again"
    for il, ih in np.ndindex(kept.shape[:2]):
        assert set(kept[il, ih][kept[il, ih] >= 0]) <= set(pos[il, ih])
    keys = cache.keys(3)
    for ih in range(cache.n_head_kv):
        order = np.argsort(cache.pos[3, ih])
        now = {int(p): keys[ih, c] for c, p in enumerate(cache.pos[3, ih]) if p >= 0}
        before = dict(zip(np.sort(pos[3, ih]).tolist(), rows[ih], strict=True))
        assert order.size and all(np.array_equal(now[p], before[p]) for p in now)


def test_with_logits_all_every_position_has_its_logits(tokens: list[int]) -> None:
    with open_llama(policy="none", n_ctx=512, n_batch=64, logits_all=True) as llama:
        llama.eval(tokens[:150])
        assert llama.scores.shape == (150, llama.n_vocab()) and len(llama.eval_logits) == 150
        at_100 = llama.scores[100].copy()
        assert llama.sample(temp=0.0, idx=100) == int(at_100.argmax())
        llama.reset()
        llama.eval(tokens[:101])
        assert int(llama.scores[-1].argmax()) == int(at_100.argmax())


def test_special_tokens_are_text_unless_asked_for(llm: Any) -> None:
    assert llm.tokenize(b"<|im_end|>", special=True) == [2]
    assert len(llm.tokenize(b"<|im_end|>", special=False)) > 1
    assert llm.detokenize([2]) == b"" and llm.detokenize([2], special=True) == b"<|im_end|>"
    with pytest.raises(OptionError, match="bytes"):
        llm.tokenize("text")


def test_a_pickled_object_is_made_again_with_the_same_options(llm: Any) -> None:
    import pickle

    with pickle.loads(pickle.dumps(llm)) as copy:
        assert copy.kv_report().budget == 256
        assert copy("Hello", max_tokens=2, temperature=0)["usage"]["completion_tokens"] == 2


def test_a_draft_model_gives_a_text_as_likely_in_fewer_batches() -> None:
    """Not the same text: batches of other sizes round differently and evict at other moments."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    prompt = "one two three four one two three four one two three four one two"
    texts, n_batches = [], []
    for draft_model in (None, LlamaPromptLookupDecoding(num_pred_tokens=6)):
        with open_llama(kv_budget=64, n_batch=64, draft_model=draft_model) as llama:
            context, decode, n = llama.engine.context, llama.engine.context.decode, [0]

            def count(*args: Any, decode: Any = decode, n: list[int] = n, **options: Any) -> int:
                n[0] += 1
                return int(decode(*args, **options))

            context.decode = count
            result = llama(prompt, max_tokens=40, temperature=0)
            assert result["kv"]["used"] <= 64
            assert llama.n_tokens == context.n_past() == result["kv"]["n_past"]
            assert result["usage"]["completion_tokens"] == 40
            texts.append(result["choices"][0]["text"])
            n_batches.append(n[0])
    assert n_batches[1] < n_batches[0]
    with open_llama(policy="none", n_ctx=256) as full:
        start = len(full.tokenize(prompt.encode()))
        nats = []
        for text in texts:
            tokens = full.tokenize((prompt + text).encode())
            logp = np.concatenate([part for _, part in rows(full, tokens)])
            nats.append(np.mean([logp[i - 1, tokens[i]] for i in range(start, len(tokens))]))
    assert abs(nats[0] - nats[1]) < 0.3
