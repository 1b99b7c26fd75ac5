"""Telling model files apart without reading all of them."""

from __future__ import annotations

import hashlib
import os

from h2o_gguf.errors import ModelFileError

__all__ = ["fingerprint"]

N_SAMPLES = 64
SAMPLE_BYTES = 4096


def fingerprint(path: str) -> str:
    """A hash of samples all over a file: equal for copies, different for models of the same shape.

    Raises: ModelFileError, it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(str(size).encode())
            for i in range(N_SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * i // (N_SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise ModelFileError(path, error.strerror or str(error)) from error
    return digest.hexdigest()[:32]
