"""What results are kept under: a change of the code behind them is another key."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest

from h2o_gguf import policies
from h2o_gguf.evaluation import sources
from h2o_gguf.evaluation.evaluator import Evaluator
from h2o_gguf.evaluation.opening import ModelFile
from h2o_gguf.evaluation.sources import code_digest, policy_key, runtime_digest

RULER = """
from h2o_gguf.policies import Granularity
from theirs.helper import lowest

class Ruler:
    def __init__(self, budget, step=1):
        self.budget, self.step = budget, step
    def victims(self, view, n):
        return lowest(view, n)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of somebody's, with a policy, a helper of it, and a module of no concern."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    texts = {
        "__init__": "",
        "ruler": RULER,
        "helper": "from . import deeper as d\n",
        "deeper": "",
        "other": "",
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "helper.py").write_text("from . import deeper\ndef lowest(view, n): return deeper.x\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] == "theirs"]:
        del sys.modules[name]


def key() -> str:
    code_digest.cache_clear()
    return policy_key(policies.as_policy(import_module("theirs.ruler").Ruler(100)))


@pytest.mark.parametrize(
    ("module", "is_another"), [("ruler", True), ("helper", True), ("deeper", True), ("other", False)]
)
def test_a_policy_is_another_when_code_behind_it_changes(
    package: Path, module: str, is_another: bool
) -> None:
    before = key()
    with (package / f"{module}.py").open("a") as file:
        file.write("# changed\n")
    assert (key() != before) == is_another


def test_knobs_of_policies_that_are_wrapped_or_inside_others_count(package: Path) -> None:
    ruler = import_module("theirs.ruler").Ruler
    keys = [policy_key(policies.as_policy(ruler(100, step))) for step in (1, 2)]
    stages = [
        policies.Staged(prompt=policies.SnapKV(64, kernel=kernel), generation=policies.H2OPlus(64))
        for kernel in (3, 5)
    ]
    keys += [policy_key(policies.as_policy(stage)) for stage in stages]
    assert len(set(keys)) == 4
    assert "object at" not in "".join(keys)  # an address is another in every run


@pytest.mark.parametrize("helper", ["selection", "observed", "knobs", "shares"])
def test_helpers_of_our_policies_count_and_other_policies_do_not(
    helper: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = sources._file

    def key_with(changed: str) -> str:
        def instead(module: str) -> Path | None:
            path = file(module)
            if module != f"h2o_gguf.policies.{changed}" or path is None:
                return path
            (tmp_path / path.name).write_bytes(path.read_bytes() + b"# changed\n")
            return tmp_path / path.name

        monkeypatch.setattr(sources, "_file", instead)
        code_digest.cache_clear()
        return policy_key(policies.make("snapkv", 100))

    try:
        assert key_with(helper) != key_with("")
        assert key_with("lazy") == key_with("")
    finally:
        code_digest.cache_clear()


def test_every_byte_of_every_library_of_the_runtime_counts(tmp_path: Path) -> None:
    def digest() -> str:
        runtime_digest.cache_clear()
        return runtime_digest(tmp_path)

    for name in ("libllama.so", "libggml-cpu-haswell.so", "libggml.so.1.2"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    before = digest()
    with (tmp_path / "libggml-cpu-haswell.so").open("r+b") as file:
        file.seek(700_001)
        file.write(b"x")
    assert digest() != before
    after = digest()
    (tmp_path / "notes.txt").write_text("no library")
    assert digest() == after


def test_the_text_that_is_read_counts_also_where_it_is_pythons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its words are those of the Python that runs."""
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    facts = []
    for words in ("One. Two.", "One. Two. Three."):
        monkeypatch.setattr("h2o_gguf.evaluation.evaluator.prose", lambda words=words: words)
        facts.append(Evaluator(ModelFile(str(model))).facts()["text"])
    facts.append(Evaluator(ModelFile(str(model)), "One. Two.").facts()["text"])
    assert facts[0] != facts[1] and facts[0] == facts[2]
