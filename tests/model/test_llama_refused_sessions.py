"""A session that cannot be loaded is refused in words, and nothing at all changes for it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import random_tokens
from llama_harness import open_tiny
from session_harness import as_file, parts_of, unchanged

from h2o_gguf.errors import BudgetError, H2OError, StateFileError

BUDGET = 48
N_LAYER, N_HEAD_KV = 2, 2  # of the tiny model
OPTIONS: dict[str, dict[str, Any]] = {
    "lazy": {"policy": "lazy", "kv_budget": BUDGET, "attic": "ram"},
    "staged": {"policy": "staged", "kv_budget": BUDGET, "attic": "ram"},
    "token": {"policy": "h2o", "kv_budget": BUDGET, "attic": "ram", "granularity": "token"},
    "layers": {"policy": "h2o", "layer_budgets": [64, 32], "attic": "ram"},
    "plain": {"policy": None, "n_ctx": 512},
}


def opened(kind: str, folder: Path, **options: Any) -> Any:
    folder.mkdir(exist_ok=True)
    return open_tiny("llama", folder, n_batch=16, kv_block=8, pin=[(0, 4)], **{**OPTIONS[kind], **options})


def write(llama: Any) -> None:
    list(itertools.islice(llama.generate([], reset=False, temp=0), 6))


def talk(llama: Any, seed: int = 0) -> None:
    """A long prompt that recalls, an answer of which some is taken back, and one more turn."""
    engine = llama.engine
    engine.pins = [(0, 4)] if engine.policy is not None else []
    engine.prefill(random_tokens(150, seed), recall=True)
    write(llama)
    engine.prefill(random_tokens(12, seed + 1), recall=True)
    write(llama)
    engine.rollback(engine.n_past - 2)


@pytest.fixture(params=list(OPTIONS), scope="module")
def llama(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """In the middle of a turn: the prompt ended earlier, and something was recalled."""
    with opened(request.param, tmp_path_factory.mktemp("model")) as llm:
        talk(llm)
        yield llm


def refusals(llama: Any) -> list[bytes]:
    """Sessions of this very object that only llama.cpp, the native part or the last check refuses."""
    parts = parts_of(llama.save_state().llama_state)
    memory, cache = parts[3], parts[4]
    wrong = [
        (3, memory[: len(memory) // 2]),
        (3, memory[:-1]),
        (3, memory + b"\0"),
        (3, b""),
        (1, parts[1][:-4]),  # a token less than the memory has
    ]
    if cache:
        wrong += [(4, cache[:-1]), (4, cache[:4] + b"\xff" + cache[5:])]
    return [as_file(*parts[:i], value, *parts[i + 1 :]) for i, value in wrong]


def test_a_refused_session_changes_nothing_at_all(llama: Any, tmp_path: Path) -> None:
    for wrong in refusals(llama):
        with unchanged(llama), pytest.raises(StateFileError):
            llama.load_state(wrong)
    own = llama.save_state().llama_state
    for wrong in (own[:-1], own + b"x", b"GGUF" * 20, None):
        with unchanged(llama), pytest.raises(StateFileError):
            llama.load_state(wrong)
    with open_tiny("llama", tmp_path, build={"seed": 1}, kv_budget=64) as other:
        other("abc", max_tokens=2)
        with unchanged(llama), pytest.raises(StateFileError):
            llama.load_state(other.save_state())


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, H2OError("mine")])
def test_a_load_that_is_torn_off_changes_nothing_at_all(
    llama: Any, error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = llama.save_state()
    llama.reset()
    talk(llama, seed=5)

    def fail() -> None:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(llama.engine, "keep_budget", fail)
    with unchanged(llama), pytest.raises(error if isinstance(error, type) else type(error)):
        llama.load_state(state)


def test_a_refused_session_leaves_an_empty_object_empty(tmp_path: Path) -> None:
    with opened("lazy", tmp_path) as one:
        talk(one)
        wrong = refusals(one)
    with opened("lazy", tmp_path) as fresh:
        for each in wrong:
            with unchanged(fresh), pytest.raises(StateFileError):
                fresh.load_state(each)
        fresh("abc", max_tokens=2)
        assert fresh.n_tokens == 5


def test_layers_that_share_other_caches_are_refused(tmp_path: Path) -> None:
    """As many groups of as many layers, whose entries would come into the wrong ones."""
    build = {"n_layer": 4}
    with opened("layers", tmp_path, build=build, layer_budgets=[64, 64, 32, 32]) as one:
        talk(one)
        state = one.save_state()
        one.load_state(state)
    with opened("layers", tmp_path, build=build, layer_budgets=[64, 32, 64, 32]) as other:
        talk(other, seed=3)
        both = re.escape("[[0, 1], [2, 3]]") + ".*" + re.escape("[[0, 2], [1, 3]]")
        with unchanged(other), pytest.raises(StateFileError, match=both):
            other.load_state(state)
    with opened("token", tmp_path, build=build, granularity="head") as whole:
        talk(whole, seed=3)
        with unchanged(whole), pytest.raises(StateFileError, match="layer_groups"):
            whole.load_state(state)


def test_logits_and_pins_that_cannot_be_are_refused(llama: Any) -> None:
    parts = parts_of(llama.save_state().llama_state)
    nan = np.full(llama.n_vocab(), np.nan, np.float32).tobytes()
    with unchanged(llama), pytest.raises(StateFileError, match="logits"):
        llama.load_state(as_file(*parts[:2], nan, *parts[3:]))
    if llama.engine.policy is None:
        return
    books = json.loads(parts[0])
    for pins in ([[10**30, 10**30 + 1]], [[0, 2**31]], [[-1, 1]], [[3, 2]]):
        wrong = as_file(json.dumps({**books, "pins": pins}).encode(), *parts[1:])
        with unchanged(llama), pytest.raises(BudgetError, match="pinned span"):
            llama.load_state(wrong)


# -- traces ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened("lazy", tmp_path_factory.mktemp("model")) as llm:
        talk(llm)
        yield llm


def with_traces(
    llama: Any,
    layers: Any = None,
    n_seen: int | None = None,
    pos: Any = None,
    numbers: Any = None,
    twice: bool = False,
) -> bytes:
    """The object's session with some of its traces replaced, under a right checksum."""
    parts = parts_of(llama.save_state().llama_state)
    (own,) = llama.engine.traces()
    pos, numbers = own.pos if pos is None else pos, own.numbers if numbers is None else numbers
    books = json.loads(parts[0])
    header = [
        list(own.layers) if layers is None else layers,
        own.n_seen if n_seen is None else n_seen,
        list(numbers.shape),
    ]
    data = pos.astype("<i4").tobytes() + numbers.astype("<f4").tobytes()
    n = 2 if twice else 1
    books["traces"] = [header] * n
    return as_file(json.dumps(books).encode(), *parts[1:5], data * n)


def changed(array: Any, value: Any) -> Any:
    """A copy whose last number is another one."""
    copy = array.copy()
    copy.flat[-1] = value
    return copy


def test_traces_that_cannot_be_are_refused_before_anything_changes(traced: Any) -> None:
    (own,) = traced.engine.traces()
    n_past, (n_layer, n_head_kv, _) = traced.n_tokens, own.pos.shape
    assert (n_layer, n_head_kv) == (N_LAYER, N_HEAD_KV)
    wrong: dict[str, dict[str, Any]] = {
        "1 heads where 2": {"pos": own.pos[:, :1], "numbers": own.numbers[:, :, :1]},
        "3 heads where 2": {
            "pos": np.concatenate([own.pos, own.pos[:, :1]], 1),
            "numbers": np.concatenate([own.numbers, own.numbers[:, :, :1]], 2),
        },
        "positions -2": {"pos": changed(own.pos, -2)},
        f"to {n_past} for": {"pos": changed(own.pos, n_past)},
        "to 2147483647 for": {"pos": changed(own.pos, 2**31 - 1)},
        "position twice": {"pos": changed(own.pos, own.pos.flat[-2])},
        "finite": {"numbers": changed(own.numbers, np.nan)},
        "no finite": {"numbers": changed(own.numbers, np.inf)},
        r"layers \(0, 7\)": {"layers": [0, 7]},
        r"layers \(-1, 0\)": {"layers": [-1, 0]},
        r"layers \(1, 0\)": {"layers": [1, 0]},
        r"layers \(0,\)": {"layers": [0], "pos": own.pos[:1], "numbers": own.numbers[:, :1]},
        "layers twice": {"twice": True},
        "-1 queries": {"n_seen": -1},
        f"{n_past + 1} queries": {"n_seen": n_past + 1},
    }
    for reason, change in wrong.items():
        with unchanged(traced), pytest.raises(StateFileError, match=reason):
            traced.load_state(with_traces(traced, **change))
    for harmless in ({}, {"pos": changed(own.pos, -1)}, {"n_seen": 0}):
        traced.load_state(with_traces(traced, **harmless))
        assert traced.n_tokens == n_past
