"""save_state and load_state: small, exact in another process, refused where they do not belong."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llama_harness import english, model_path, open_llama, open_tiny

from h2o_gguf.errors import StateFileError


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with open_llama(kv_budget=128, pin=[(0, 10)]) as llama:
        yield llama


def go_on(llama: Any, n: int = 30) -> list[int]:
    return list(itertools.islice(llama.generate([], reset=False, temp=0), n))


LOAD = """
import itertools, json, pickle, sys
from h2o_gguf import H2OLlama
llama = H2OLlama(sys.argv[1], kv_budget=128, n_threads=1)
llama.load_state(pickle.load(open(sys.argv[2], "rb")))
before = llama.kv_report().as_dict()
tokens = list(itertools.islice(llama.generate([], reset=False, temp=0), 30))
print(json.dumps([before, tokens, llama.engine.pins]))
"""


def test_a_session_goes_on_in_a_new_process_as_if_it_had_never_stopped(llm: Any, tmp_path: Path) -> None:
    llm.reset()
    llm(english(3000), max_tokens=20, temperature=0)
    assert llm.kv_report().evicted > 300
    file = tmp_path / "state"
    file.write_bytes(pickle.dumps(llm.save_state()))
    report = llm.kv_report().as_dict()
    expected = go_on(llm)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, model_path(), str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        cwd=tmp_path,  # not the repository, whose h2o_gguf/ is only a part of the package
    )
    before, tokens, pins = json.loads(done.stdout)
    assert before == report
    assert tokens == expected
    assert pins == [[0, 10]]


def test_a_sessions_size_grows_with_the_cells_used(llm: Any) -> None:
    sizes = []
    for n in (20, 40, 120):
        llm.reset()
        llm.eval(llm.tokenize(english(3000).encode())[:n])
        sizes.append(llm.save_state().llama_state_size)
    per_token = (sizes[2] - sizes[1]) / 80
    assert sizes[1] - sizes[0] == pytest.approx(20 * per_token, rel=0.01)
    assert 23_040 <= per_token < 26_000  # K and V of 30 layers, 3 heads, 64 values in f16, and our books
    assert sizes[0] < 2 << 20


def test_loading_takes_an_object_back_to_where_it_was_saved(llm: Any) -> None:
    llm.reset()
    llm(english(2000), max_tokens=4, temperature=0)
    state = llm.save_state()
    first = go_on(llm, 8)
    llm("Something else", max_tokens=4)
    llm.load_state(state)
    assert go_on(llm, 8) == first
    llm.load_state(state.llama_state)
    assert go_on(llm, 8) == first


def test_a_prompt_that_continues_a_loaded_session_is_not_read_again(llm: Any) -> None:
    llm.reset()
    llm(english(2000), max_tokens=4, temperature=0)
    state = llm.save_state()
    expected = llm([*state.input_ids, 28, 216], max_tokens=4, temperature=0)
    llm.reset()
    llm.load_state(state)
    seen: list[int] = []
    again = llm(
        [*state.input_ids, 28, 216],
        max_tokens=4,
        temperature=0,
        progress=lambda done, total: seen.append(total),
    )
    assert again["choices"] == expected["choices"] and seen == [2]


def test_a_session_loaded_into_a_smaller_budget_is_brought_down_to_it(llm: Any) -> None:
    llm.reset()
    llm(english(2000), max_tokens=1, temperature=0)
    state = llm.save_state()
    with open_llama(kv_budget=64, n_recent=8, n_batch=64) as small:
        small.load_state(state)
        assert small.kv_report().used == 64
        assert small([*state.input_ids, 28], max_tokens=2)["usage"]["completion_tokens"] == 2


def test_another_models_session_is_refused_and_the_object_keeps_its_own(llm: Any, tmp_path: Path) -> None:
    llm.reset()
    llm("Hello there", max_tokens=2)
    n_past, state = llm.n_tokens, llm.save_state()
    with (
        open_tiny("llama", tmp_path, kv_budget=100) as other,
        open_tiny("llama", tmp_path / "..", build={"seed": 1}, kv_budget=100) as twin,
    ):
        other("abc", max_tokens=2)
        with pytest.raises(StateFileError, match="model"):
            other.load_state(state)
        with pytest.raises(StateFileError, match="model"):
            llm.load_state(other.save_state())
        with pytest.raises(StateFileError, match="fingerprint"):
            twin.load_state(other.save_state())  # the same shape, other weights
        assert other.n_tokens == 5
    assert llm.n_tokens == n_past


def test_a_session_with_eviction_is_refused_without_it(llm: Any) -> None:
    llm.reset()
    llm("Hello there", max_tokens=2)
    state = llm.save_state()
    with open_llama(policy="none", n_ctx=256) as plain:
        with pytest.raises(StateFileError, match="eviction"):
            plain.load_state(state)
        plain("Hello", max_tokens=2)
        kept = plain.save_state()
        expected = go_on(plain, 8)
        plain.load_state(kept)
        assert go_on(plain, 8) == expected


@pytest.mark.parametrize(
    "option", [{"rope_freq_base": 50_000.0}, {"rope_freq_scale": 0.5}, {"rope_scaling_type": 2}]
)
def test_a_session_is_refused_where_positions_are_rotated_differently(
    option: dict[str, Any], tmp_path: Path
) -> None:
    with open_tiny("llama", tmp_path, kv_budget=64) as one:
        one("abcdefgh" * 20, max_tokens=2)
        state = one.save_state()
    with open_tiny("llama", tmp_path, kv_budget=64, **option) as other:
        with pytest.raises(StateFileError, match=next(iter(option))):
            other.load_state(state)
        other("abc", max_tokens=1)
    with open_tiny("llama", tmp_path, kv_budget=64) as same:
        same.load_state(state)


def test_entries_evicted_by_head_are_refused_by_a_policy_that_needs_them_alike(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, kv_budget=64) as head:
        head("abc", max_tokens=1)
        whole = head.save_state()
        head("abcdefgh" * 20, max_tokens=2)
        evicted = head.save_state()
    with open_tiny("llama", tmp_path, kv_budget=64, granularity="token") as token:
        with pytest.raises(StateFileError, match="evictions were by head"):
            token.load_state(evicted)
        token.load_state(whole)
        token("abcdefgh" * 20, max_tokens=2)
        evicted = token.save_state()
    for granularity in ("token", "layer", "head"):
        with open_tiny("llama", tmp_path, kv_budget=64, granularity=granularity) as other:
            other.load_state(evicted)
            assert other([*evicted.input_ids, *[70] * 100], max_tokens=2)["kv"]["used"] == 64


@pytest.mark.parametrize("damage", ["empty", "cut", "foreign", "garbage"])
def test_damaged_sessions_are_refused_and_the_object_stays_usable(llm: Any, damage: str) -> None:
    llm.reset()
    llm("Hello there", max_tokens=2)
    data = llm.save_state().llama_state
    broken = {
        "empty": b"",
        "cut": data[: len(data) // 2],
        "foreign": b"GGUF" + data[4:],
        "garbage": data[:-6000] + b"\xff" * 6000,
    }[damage]
    with pytest.raises(StateFileError):
        llm.load_state(broken)
    assert llm("Hello there", max_tokens=2)["usage"]["completion_tokens"] == 2
