"""Results on disk, so that a second run does only what is new."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import diskcache
import platformdirs
from diskcache.core import MODE_PICKLE
from pydantic import TypeAdapter, ValidationError

from h2o_gguf.errors import OptionError

__all__ = ["Store", "default_folder"]

T = TypeVar("T")


def default_folder() -> Path:
    """Where results lie unless the user says otherwise."""
    return Path(platformdirs.user_cache_path("h2o-gguf", False)) / "evaluation"


class _JSON(diskcache.JSONDisk):  # type: ignore[misc]
    """JSON only: the other format is pickle, which runs what a file says."""

    def fetch(self, mode: int, filename: str, value: Any, read: bool) -> Any:
        if mode == MODE_PICKLE:
            raise ValueError("a pickle is not read")
        return super().fetch(mode, filename, value, read)


class Store:
    """Dataclasses under JSON keys.  folder : None keeps nothing. facts : a part of every key."""

    def __init__(self, folder: Path | None, facts: Mapping[str, Any]) -> None:
        """Raises: OptionError, the folder is none, or not ours to write."""
        self._facts = dict(facts)
        self._folder = folder
        self._disk: Any = None
        if folder is not None:
            with self._refusing():
                self._disk = diskcache.Cache(str(folder), disk=_JSON)

    def get(self, key: Mapping[str, Any], kind: type[T]) -> T | None:
        """The dataclass that was put under the key; None for nothing, or for what is no such thing.

        Raises: OptionError, the folder cannot be read.
        """
        if self._disk is None:
            return None
        with self._refusing():
            try:
                return TypeAdapter(kind).validate_python(self._disk.get(self._digest(key)))
            except (ValidationError, ValueError, TypeError, zlib.error):  # damaged: it is measured again
                return None

    def put(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Keep a value; it is on disk when this returns.  Raises: OptionError, it cannot be written."""
        if self._disk is not None:
            with self._refusing():
                self._disk.set(self._digest(key), dict(value))

    def close(self) -> None:
        """Leave the files alone from here on."""
        if self._disk is not None:
            self._disk.close()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, diskcache.Timeout, OSError) as error:
            raise OptionError(
                f"results cannot be kept in {str(self._folder)!r}: {error}. "
                "Take another folder (--cache DIR), or keep none (--cache off)",
                "cache",
            ) from error

    def _digest(self, key: Mapping[str, Any]) -> str:
        text = json.dumps({**self._facts, **key}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()
