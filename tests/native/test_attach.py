"""Attaching and detaching: which models, which options, how many contexts, in which order they end."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import opened, policy_of, random_tokens, require_runtime
from tiny_models import ARCHITECTURES, build, native

from h2o_gguf.errors import (
    BudgetError,
    ClosedError,
    H2OError,
    OptionError,
    PolicyError,
    UnsupportedModelError,
)
from h2o_gguf.models.shape import read_shape
from h2o_gguf.models.support import support
from h2o_gguf.policies import make


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_evicts_or_is_refused_in_words(arch: str, tmp_path: Path) -> None:
    expected = ARCHITECTURES[arch]
    path = build(arch, tmp_path / "m.gguf")
    if expected.evicts:
        with opened(path, n_ctx=512, n_ubatch=32, budget=48, block=8) as run:
            policy_of(run, make("h2o+", 48, n_recent=16))
            assert np.isfinite(run.feed(random_tokens(150), 30)).all()
            assert run.cache.n_evicted > 50
            assert run.cache.layer_ids == expected.layers == support(read_shape(path)).evicted_layers
        return
    with pytest.raises(UnsupportedModelError) as refusal, opened(path, budget=48):
        pass
    assert len(str(refusal.value)) > 40
    assert not support(read_shape(path)).can_evict, "the header says so before anything is loaded"


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"budget": -1}, BudgetError),
        ({"budget": 257}, BudgetError),
        ({"budget": 2**40}, BudgetError),
        ({"budget": 64, "block": 0}, OptionError),
        ({"budget": 64, "decay": 0.0}, OptionError),
        ({"budget": 64, "decay": 1.5}, OptionError),
        ({"budget": 64, "decay": float("nan")}, OptionError),
        ({"budget": 64, "n_pos_max": -5}, OptionError),
        ({"budget": 64, "attention": "magic"}, OptionError),
    ],
)
def test_illegal_parameters_are_errors(
    params: dict[str, object], error: type[Exception], tmp_path: Path
) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with pytest.raises(error), opened(path, **params):
        pass


def test_a_window_larger_than_its_cache_is_refused(tmp_path: Path) -> None:
    path = build("gemma3", tmp_path / "m.gguf", n_swa=400)
    with pytest.raises(H2OError, match="sliding-window"), opened(path, n_ctx=256, budget=64):
        pass


def test_two_contexts_share_nothing(tmp_path: Path) -> None:
    """Different shapes, used in turn, ended in either order."""
    paths = [build("llama", tmp_path / "a.gguf"), build("phi3", tmp_path / "b.gguf", n_layer=3)]
    tokens = random_tokens(200)
    alone = []
    for path in paths:
        with opened(path, n_ubatch=32, budget=64, block=8) as run:
            policy_of(run, make("h2o+", 64))
            alone.append(run.feed(tokens, 10))
    with (
        opened(paths[0], n_ubatch=32, budget=64, block=8) as a,
        opened(paths[1], n_ubatch=32, budget=64, block=8) as b,
    ):
        policy_of(a, make("h2o+", 64))
        policy_of(b, make("h2o+", 64))
        got: list[list[np.ndarray]] = [[], []]
        for i in range(0, 200, 10):
            for run, rows in ((a, got[0]), (b, got[1])):
                rows.append(run.decode(tokens[i : i + 10]))
        a.cache.close()  # detached: decodes on, as stock llama.cpp does
        for use in (a.cache.used, lambda: a.cache.set_policy(None), lambda: a.cache.set_observer(None)):
            with pytest.raises(ClosedError):
                use()
        b.decode(tokens[:10])
    for expected, rows in zip(alone, got, strict=True):
        assert np.array_equal(expected, np.concatenate(rows))


def test_a_cache_outlives_its_context_and_says_so(tmp_path: Path) -> None:
    bindings = require_runtime()
    lib, _ = native.library()
    with native.model(build("llama", tmp_path / "m.gguf")) as model:
        ctx = lib.llama_init_from_model(model, lib.llama_context_default_params())
        cache = bindings.KVCache(ctypes.cast(ctx, ctypes.c_void_p).value, budget=64)
        lib.llama_free(ctx)
        with pytest.raises(ClosedError, match="freed"):
            cache.used()
        cache.close()
        cache.close()


def test_detaching_clears_what_llama_cpp_cannot_go_on_with(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf", n_ctx_train=128)
    with opened(path, n_ubatch=32, budget=48, block=8) as run:
        policy_of(run, make("h2o+", 48))
        run.feed(random_tokens(300), 30)
        run.cache.close()
        assert run.lib.llama_memory_seq_pos_max(run.memory, 0) == -1
        got = run.decode(random_tokens(20))
    with opened(path, n_ubatch=32) as fresh:
        assert np.array_equal(fresh.decode(random_tokens(20)), got)
    with opened(path, n_ubatch=32, budget=200) as run:
        run.decode(random_tokens(20))
        run.cache.close()
        assert run.lib.llama_memory_seq_pos_max(run.memory, 0) == 19, "what was never evicted from stays"


def test_a_policy_only_looks(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with opened(path, n_ubatch=32, budget=48, block=8) as run:
        refused: list[str] = []

        def meddling(view: object, n: int) -> np.ndarray:
            for call in (
                run.cache.rebase,
                lambda: run.cache.make_room(4),
                run.cache.save,
            ):
                with pytest.raises(H2OError) as error:
                    call()
                refused.append(str(error.value))
            assert run.cache.keys(0).any(), "reading is looking"
            return np.broadcast_to(np.arange(n, dtype=np.int32), (*run.cache.pos_shape, n))

        run.cache.pos_shape = run.cache.pos.shape[:2]
        run.cache.set_policy(meddling)
        run.feed(random_tokens(120), 30)
        assert len(refused) >= 3 and all("must not change" in text for text in refused)


@pytest.mark.parametrize("bad", [2**32 + 3, -1, 2.7, None, "3"])
def test_victims_that_are_no_cells_are_refused(bad: object, tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    with opened(path, budget=48) as run:
        run.decode(random_tokens(20))
        victims = np.full((run.cache.n_layer, run.cache.n_head_kv, 1), bad)
        with pytest.raises(PolicyError):
            run.cache.evict(victims)
        assert run.cache.used() == 20


def test_closing_many_times_leaks_nothing(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    path = build("llama", tmp_path / "m.gguf")

    def once() -> None:
        with opened(path, n_ctx=4096, budget=64) as run:
            policy_of(run, make("h2o+", 64))
            run.feed(random_tokens(100), 20)

    for _ in range(5):
        once()
    gc.collect()
    before = psutil.Process().memory_info().rss
    for _ in range(20):
        once()
    gc.collect()
    grown = psutil.Process().memory_info().rss - before
    # One context here takes 8 MB of KV cache and as much of scores and positions.
    assert grown < 8 * 2**20, f"{grown / 2**20:.1f} MiB after 20 rounds"


def test_interpreter_exit_is_quiet_with_everything_open(tmp_path: Path) -> None:
    path = build("llama", tmp_path / "m.gguf")
    code = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
import ctypes
from harness import opened, policy_of, random_tokens
from h2o_gguf.policies import make
manager = opened({str(path)!r}, budget=64)
run = manager.__enter__()
policy_of(run, make("h2o+", 64))
run.feed(random_tokens(100), 20)
"""
    require_runtime()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("first", ["llama_cpp", "h2o_gguf"])
def test_llama_cpp_may_be_imported_before_or_after(first: str, tmp_path: Path) -> None:
    """Before: it works if it found our library, or the error says what to do."""
    bindings = require_runtime()
    second = "h2o_gguf.bindings" if first == "llama_cpp" else "llama_cpp"
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(bindings.library_path().parent)}
    code = f"import {first}, {second}; import h2o_gguf.bindings as b; print(b.version())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == bindings.version()


def test_a_missing_or_foreign_library_is_recognised(tmp_path: Path) -> None:
    require_runtime()
    code = "import h2o_gguf.bindings as b; b.version()"
    for content, words in ((None, "missing"), (b"not a library", "cannot be loaded")):
        folder = tmp_path / words.replace(" ", "-")
        folder.mkdir()
        if content is not None:
            (folder / "libllama.so").write_bytes(content)
        env = {**os.environ, "H2O_GGUF_LIB_PATH": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=env,
            cwd=tmp_path,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1 and "LibraryError" in done.stderr and words in done.stderr
