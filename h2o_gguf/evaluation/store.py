"""Results on disk, so that a second run does only what is new."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diskcache
import platformdirs

from h2o_gguf.policies import Policy

__all__ = ["HARNESS", "Store", "default_folder", "policy_key"]

HARNESS = 1  # to be raised when the same cell would come out differently


def default_folder() -> Path:
    """Where results lie unless the user says otherwise."""
    return Path(platformdirs.user_cache_path("h2o-gguf", False)) / "evaluation"


class Store:
    """JSON objects under JSON keys.  folder : None keeps nothing. facts : a part of every key."""

    def __init__(self, folder: Path | None, facts: Mapping[str, Any]) -> None:
        self._facts = {"harness": HARNESS, **facts}
        # Its other format is pickle, which runs what a file says.
        self._disk = diskcache.Cache(str(folder), disk=diskcache.JSONDisk) if folder is not None else None

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was put under the key; None for nothing."""
        if self._disk is None:
            return None
        found: dict[str, Any] | None = self._disk.get(self._digest(key))
        return found

    def put(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> None:
        """Keep a value; it is on disk when this returns."""
        if self._disk is not None:
            self._disk.set(self._digest(key), dict(value))

    def close(self) -> None:
        """Leave the files alone from here on."""
        if self._disk is not None:
            self._disk.close()

    def _digest(self, key: Mapping[str, Any]) -> str:
        text = json.dumps({**self._facts, **key}, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def policy_key(policy: Policy) -> str:
    """What a policy is and does, its knobs and its module's text: a changed one is measured again."""
    kind = type(policy)
    try:
        text = Path(inspect.getfile(kind)).read_bytes()
    except (OSError, TypeError):
        text = b""
    parts = "".join(policy_key(part) for part in getattr(policy, "parts", {}).values())  # of LayerBudgets
    knobs = {name: getattr(policy, name, None) for name in getattr(kind, "__dataclass_fields__", ())}
    return f"{kind.__qualname__} {knobs} {hashlib.sha256(text).hexdigest()[:16]}{parts}"
