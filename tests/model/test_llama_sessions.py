"""save_state and load_state: small, exact in another process, refused where they do not belong."""

from __future__ import annotations

import itertools
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import random_tokens
from llama_harness import english, model_path, open_llama, open_tiny
from session_harness import as_file, parts_of, unchanged

from h2o_gguf.errors import BudgetError, StateFileError
from h2o_gguf.state import FORMAT, HEAD, MAGIC


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


@pytest.mark.parametrize("policy", ["h2o+", "lazy"])  # of keys and values as they came, of queries
def test_what_a_policy_remembers_of_entries_is_saved_with_them(policy: str) -> None:
    with open_llama(kv_budget=128, policy=policy) as llama, open_llama(kv_budget=128, policy=policy) as other:
        llama(english(3000), max_tokens=4, temperature=0)
        before = llama.engine.view()
        other.load_state(llama.save_state())
        after = other.engine.view()
        assert np.count_nonzero(before.traces) > 0
        for il, ih in np.ndindex(before.shape[:2]):
            assert traces_by_position(after, il, ih) == traces_by_position(before, il, ih)
        assert go_on(other, 200) == go_on(llama, 200), "two evictions more"
        # Another policy's are of no use.
        with open_llama(kv_budget=128, policy="r-kv") as stranger:
            stranger.load_state(llama.save_state())
            assert len(go_on(stranger, 80)) == 80


def traces_by_position(view: Any, il: int, ih: int) -> dict[int, list[float]]:
    held = np.flatnonzero(view.pos[il, ih] >= 0)
    return {int(view.pos[il, ih, cell]): view.traces[:, il, ih, cell].tolist() for cell in held}


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


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A tiny model in the middle of a sequence, with pins and evicted entries."""
    with open_tiny("llama", tmp_path_factory.mktemp("model"), kv_budget=32, pin=[(0, 4)]) as llama:
        llama("abcdefgh" * 6, max_tokens=4)
        yield llama


def test_a_session_with_a_flipped_bit_anywhere_is_refused(small: Any) -> None:
    data = small.save_state().llama_state
    with unchanged(small):
        for at in (*range(HEAD.size + 64), *range(HEAD.size + 64, len(data), 997), len(data) - 1):
            damaged = bytearray(data)
            damaged[at] ^= 1 << at % 8
            with pytest.raises(StateFileError):
                small.load_state(damaged)


def test_a_session_of_another_length_is_refused(small: Any) -> None:
    data = small.save_state().llama_state
    with unchanged(small):
        for n in (*range(HEAD.size + 32), *range(HEAD.size + 32, len(data), 991), len(data) - 1):
            with pytest.raises(StateFileError):
                small.load_state(data[:n])
        with pytest.raises(StateFileError, match=f"{len(data) + 1} bytes instead of {len(data)}"):
            small.load_state(data + b"\0")


@pytest.mark.parametrize(
    "state",
    [None, 5, "text", ["bytes"], object(), SimpleNamespace(llama_state=None), b"GGUF" * 100,
     SimpleNamespace(llama_state=b"ggsn" + bytes(200))],
)  # fmt: skip
def test_what_is_no_session_is_refused_as_one(small: Any, state: Any) -> None:
    with unchanged(small), pytest.raises(StateFileError, match="no saved session"):
        small.load_state(state)


def test_a_session_of_another_format_names_both(small: Any) -> None:
    data = bytearray(small.save_state().llama_state)
    for written, by, what in (
        (FORMAT + 1, "a newer", "update"),
        (FORMAT - 1, "an older", "read its text again"),
    ):
        data[len(MAGIC)] = written
        match = f"format {written}, by {by} version .* format {FORMAT} alone: .*{what}"
        with unchanged(small), pytest.raises(StateFileError, match=match):
            small.load_state(bytes(data))


@pytest.mark.parametrize("name", ["facts", "traces", "pins", "granularity", "n_evicted"])
@pytest.mark.parametrize(
    "value",
    [None, 3, "x", [[1]], ["ab"], {"a": 1}, float("nan"), float("inf"), [[[0], 0, [1, 1, 1, 1 << 50]]]],
)
def test_books_of_the_wrong_type_are_refused(small: Any, name: str, value: Any) -> None:
    books, *rest = parts_of(small.save_state().llama_state)
    for wrong in ({**json.loads(books), name: value}, value):
        if (name, value) != ("n_evicted", 3) or wrong is value:
            with unchanged(small), pytest.raises(StateFileError):
                small.load_state(as_file(json.dumps(wrong).encode(), *rest))
    missing = {key: kept for key, kept in json.loads(books).items() if key != name}
    with unchanged(small), pytest.raises(StateFileError):
        small.load_state(as_file(json.dumps(missing).encode(), *rest))


@pytest.mark.parametrize(
    ("part", "value"),
    [
        *itertools.product(range(6), [b"\xff" * 3, b"\x7f" * 4000]),
        *((part, b"") for part in (0, 1, 3, 4, 5)),  # without logits a session is whole
    ],
)
def test_parts_that_contradict_each_other_are_refused(small: Any, part: int, value: bytes) -> None:
    parts = parts_of(small.save_state().llama_state)
    parts[part] = value
    with unchanged(small), pytest.raises(StateFileError):
        small.load_state(as_file(*parts))
    for wrong in (parts[:4], [*parts, b""]):
        with unchanged(small), pytest.raises(StateFileError):
            small.load_state(as_file(*wrong))


def test_a_session_that_does_not_fit_leaves_the_sequence_as_it_was(small: Any, tmp_path: Path) -> None:
    build = {"n_ctx_train": 1024}
    with open_tiny("llama", tmp_path, build=build, policy=None) as long:
        long("abcdefgh" * 50, max_tokens=1)
        state = long.save_state()
    with open_tiny("llama", tmp_path, build=build, policy=None, n_ctx=300) as short:
        short("abc", max_tokens=2)
        with unchanged(short), pytest.raises(StateFileError, match=r"401 tokens.*holds 300"):
            short.load_state(state)
    with open_tiny("llama", tmp_path, build=build, kv_budget=600) as wide:
        wide("abcdefgh" * 80, max_tokens=1)
        state = wide.save_state()
    with open_tiny("llama", tmp_path, build=build, kv_budget=100, n_batch=32) as narrow:
        narrow("abc", max_tokens=2)
        with unchanged(narrow), pytest.raises(StateFileError, match="smaller"):
            narrow.load_state(state)


def test_pins_that_do_not_fit_into_the_budget_are_refused(small: Any, tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, kv_budget=100, pin=[(0, 90)], n_recent=4) as wide:
        wide("abcdefgh" * 20, max_tokens=1)
        state = wide.save_state()
    with unchanged(small), pytest.raises(BudgetError, match="budget of 32") as caught:
        small.load_state(state)
    assert caught.value.n_pinned > 32


def test_a_session_is_refused_where_the_cache_is_laid_out_differently(tmp_path: Path) -> None:
    with open_tiny("llama", tmp_path, kv_budget=64) as flash:
        flash("abc", max_tokens=1)
        state = flash.save_state()
    with open_tiny("llama", tmp_path, kv_budget=64, flash_attn=False) as plain:
        plain("abc", max_tokens=1)
        with unchanged(plain), pytest.raises(StateFileError, match="flash_attn"):
            plain.load_state(state)


@pytest.mark.parametrize("fate", ["deleted", "replaced"])
def test_a_model_file_that_is_gone_does_not_matter_to_a_loaded_model(tmp_path: Path, fate: str) -> None:
    with open_tiny("llama", tmp_path, kv_budget=64) as llama:
        file = Path(llama.model_path)
        llama("abcdefgh" * 20, max_tokens=2)
        kept = file.rename(tmp_path / "kept.gguf")
        if fate == "replaced":
            file.write_bytes(b"another file")
        state = llama.save_state()
        expected = go_on(llama, 8)
        llama.load_state(state)
        assert go_on(llama, 8) == expected
    kept.rename(file)
    with open_tiny("llama", tmp_path, kv_budget=64) as again:
        again.load_state(state)
        assert go_on(again, 8) == expected


@pytest.mark.parametrize("n", [50, 57])
def test_what_a_policy_remembers_of_entries_that_may_come_back_is_saved_too(n: int, tmp_path: Path) -> None:
    """Some left for the attic since the policy looked at them, and are recalled before it looks again."""
    options = {"kv_budget": 40, "n_batch": 8, "kv_block": 8, "attic": "ram", "recall_every": 1}
    with open_tiny("llama", tmp_path, **options) as llm, open_tiny("llama", tmp_path, **options) as other:
        llm.eval(random_tokens(n))
        list(itertools.islice(llm.generate([], reset=False, temp=0), 8))
        other.load_state(llm.save_state())
        for each in (llm, other):
            each.eval(random_tokens(64, seed=1))
        np.testing.assert_array_equal(llm.engine.logits, other.engine.logits)


def test_a_session_keeps_its_attic_where_there_is_one(tmp_path: Path) -> None:
    options = {"policy": "h2o", "kv_budget": 40, "n_batch": 16, "kv_block": 8}
    with open_tiny("llama", tmp_path, **options, attic="ram") as llm:
        llm.engine.prefill(random_tokens(150))
        llm.engine.prefill(random_tokens(12, 1), recall=True)
        state, kept = llm.save_state(), llm.engine.report().attic
        llm.engine.prefill(random_tokens(12, 2), recall=True)
        pos = np.sort(llm.engine.cache.pos, axis=-1)
    assert kept.entries == 122
    with open_tiny("llama", tmp_path, **options, attic="ram") as llm:
        llm.load_state(state)
        assert (llm.engine.report().attic.entries, llm.engine.report().attic.bytes) == (122, kept.bytes)
        llm.engine.prefill(random_tokens(12, 2), recall=True)
        np.testing.assert_array_equal(np.sort(llm.engine.cache.pos, axis=-1), pos)
    with open_tiny("llama", tmp_path, **options) as llm:
        llm.load_state(state)
        assert llm.engine.report().attic is None and llm.engine.report().evicted == 122
        llm.engine.prefill(random_tokens(12, 2), recall=True)
        without = llm.save_state()
    with open_tiny("llama", tmp_path, **options, attic="ram") as llm:
        llm.load_state(without)
        assert llm.engine.report().attic.entries == 0 and llm.engine.report().evicted == 134
        llm.engine.prefill(random_tokens(12, 3), recall=True)
        assert llm.engine.report().attic.entries == 12
