"""Policies by name: ours, spellings, suggestions, and those of other packages."""

import inspect
import sys
from pathlib import Path

import numpy as np
import pytest

from h2o_gguf import policies
from h2o_gguf.errors import OptionError, PolicyError
from h2o_gguf.evaluation.variants import with_controls
from h2o_gguf.view import CacheView

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]


def test_names_start_with_the_default() -> None:
    assert policies.names()[:4] == ["h2o+", "h2o", "streaming", "random"]
    assert policies.names()[-1] == "none"


@pytest.mark.parametrize("name", ["h2o+", "H2O+", "h2o-plus", "h2o_plus", "h2oplus", " h2o+ "])
def test_the_default_has_spellings_for_urls_and_shells(name: str) -> None:
    assert policies.get(name) is policies.H2OPlus


def test_unknown_name_suggests_the_closest_and_lists_all() -> None:
    with pytest.raises(
        OptionError, match=r"did you mean 'streaming'\? there are h2o\+, h2o, streaming"
    ) as caught:
        policies.get("steaming")
    assert caught.value.options == ("policy",)
    with pytest.raises(OptionError, match="there are") as caught:
        policies.get("zzzzzz")
    assert "did you mean" not in str(caught.value)


def test_unknown_knob_is_named_with_the_legal_ones() -> None:
    with pytest.raises(OptionError, match="has no n_obs: it takes budget, n_sink, n_recent") as caught:
        policies.make("h2o", budget=64, n_obs=3)
    assert caught.value.options == ("n_obs",)


def test_make_passes_knobs_on() -> None:
    assert policies.make("random", 64, n_sink=1, n_recent=2, granularity="token", seed=7) == policies.Random(
        64, 1, 2, "token", 7
    )


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_eviction.py").write_text(
        "class Newest:\n"
        "    def __init__(self, budget, **knobs):\n"
        "        self.budget, self.knobs = budget, knobs\n"
        "    def victims(self, view, n):\n"
        "        return view.pos.argsort(axis=-1)[..., :n]\n"
    )
    info = tmp_path / "acme_eviction-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-eviction\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[h2o_gguf.policies]\n"
        "acme_newest = acme_eviction:Newest\n"
        "broken = acme_missing:Gone\n"
        "h2o = acme_missing:Gone\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("other_package")
def test_policies_of_other_packages_are_found_by_name() -> None:
    assert {"acme-newest", "broken"} <= set(policies.names())
    policy = policies.make("acme_newest", budget=64, anything=1)
    assert (policy.name, policy.budget, policy.n_recent) == ("Newest", 64, 0)


@pytest.mark.usefixtures("other_package")
def test_a_policy_is_evaluated_under_the_name_it_was_asked_for_by() -> None:
    variants = with_controls(["ACME_Newest", "acme-newest", "H2OPlus"], [64])
    assert [v.name for v in variants] == [
        "acme-newest", "h2o+", "streaming", "random like acme-newest", "random like h2o+"
    ]  # fmt: skip
    assert [v.make(64).name for v in variants] == ["Newest", "h2o+", "streaming", "random", "random"]


@pytest.mark.usefixtures("other_package")
def test_a_broken_package_is_an_error_only_when_asked_for() -> None:
    with pytest.raises(PolicyError, match=r"cannot import acme_missing:Gone: ModuleNotFoundError"):
        policies.get("broken")


@pytest.mark.usefixtures("other_package")
def test_other_packages_cannot_take_our_names() -> None:
    assert policies.get("h2o") is policies.H2O
    assert policies.names().count("h2o") == 1


@pytest.mark.parametrize("name", policies.names())
def test_every_policy_says_what_it_keeps(name: str) -> None:
    assert policies.keeps(policies.make(name, 64).name) != policies.keeps("a stranger's")


@pytest.mark.parametrize("name", policies.names())
def test_the_document_names_every_policy_and_every_knob_of_its_own(name: str) -> None:
    rows = (ROOT / "docs/policies.md").read_text().splitlines()
    row = next(line for line in rows if line.startswith(f"| `{name}` |"))
    shared = {"budget", "n_sink", "n_recent", "granularity"}
    for knob in inspect.signature(policies.get(name)).parameters.keys() - shared:
        assert f"`{knob}" in row, knob


@pytest.fixture
def example_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/example_package as an installer leaves it."""
    source = ROOT / "tests/example_package"
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    info = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
            for group, points in project["entry-points"].items()
        )
    )
    monkeypatch.syspath_prepend(str(source))
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("example_package")
def test_the_example_package_is_a_policy_by_name() -> None:
    policy = policies.make("ruler", 24, n_recent=4)
    assert (policy.name, policy.budget, policy.n_sink, policy.n_observed) == ("Ruler", 24, 4, 0)
    pos = np.arange(20, dtype=np.int32).reshape(1, 1, 20)
    victims = policies.ask(policy, CacheView(np.zeros(pos.shape, np.float32), pos, 20, 20), 9)
    kept = sorted(set(range(20)) - set(victims.ravel().tolist()))
    # Of 4 to 15, those with the highest power of two over age: 8 / 12, 4 / 8, 2 / 6.
    assert kept == [0, 1, 2, 3, 8, 12, 14, 16, 17, 18, 19]
