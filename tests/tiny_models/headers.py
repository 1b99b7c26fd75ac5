"""Headers without files, for what only reads metadata."""

from __future__ import annotations

from pathlib import Path

from h2o_gguf.models.header import Header, TensorInfo

BASE = {
    "context_length": 4096,
    "embedding_length": 512,
    "block_count": 12,
    "feed_forward_length": 1024,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
}


def header(arch: str, *, tensors: tuple[str, ...] = (), **keys: object) -> Header:
    """A header of this architecture; keyword `a__b=1` sets `<arch>.a.b`, None removes a key."""
    values = {**BASE, **{key.replace("__", "."): value for key, value in keys.items()}}
    metadata = {f"{arch}.{key}": value for key, value in values.items() if value is not None}
    metadata["general.architecture"] = arch
    infos = {name: TensorInfo(name, (1,), "F32", 0, 4) for name in tensors}
    return Header(Path("made-up.gguf"), 3, 1000, metadata, infos)
