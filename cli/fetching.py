"""Fetching a catalog model with a bar."""

from __future__ import annotations

from pathlib import Path

from h2o_gguf import models
from h2o_gguf.cli.progress import LateBar
from h2o_gguf.cli.render import notice

__all__ = ["fetch_with_bar"]


def fetch_with_bar(name: str) -> Path:
    """Fetch a model of the catalog unless it is here and whole; return its path.

    Raises: FetchError, ChecksumError, ModelFileError.
    """
    with LateBar("fetching", "bytes") as bar:
        path = models.fetch(
            name,
            lambda n, n_total, stage: bar.update(n, n_total, title=stage),
            on_damage=lambda damage: notice(f"{damage}: it is damaged and fetched again."),
        )
    notice(f"{path} is here and its checksum is right.")
    return path
