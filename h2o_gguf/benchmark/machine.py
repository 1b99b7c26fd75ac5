"""The machine: what it is, and how fast it reads memory."""

from __future__ import annotations

import hashlib
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from h2o_gguf.bindings import version
from h2o_gguf.text import readable

__all__ = ["ReadBandwidth", "environment"]

BUFFER_BYTES = 512 << 20
PER_CACHE = 16  # times the largest cache, if that is more
PASSES = 3
PAUSE_S = 0.02  # until threads of the process whose turn it was have stopped spinning


class ReadBandwidth:
    """Measures the bytes per second that n_threads threads read from a buffer far larger than the caches."""

    def __init__(self, n_threads: int) -> None:
        n = max(BUFFER_BYTES, PER_CACHE * _largest_cache()) // 8 // n_threads
        self._parts = [np.ones(n, np.int64) for _ in range(n_threads)]
        self._threads = ThreadPoolExecutor(n_threads)

    def __call__(self) -> float:
        """The best of a few passes."""
        time.sleep(PAUSE_S)
        best_s = min(self._pass() for _ in range(PASSES))
        return sum(part.nbytes for part in self._parts) / best_s

    def _pass(self) -> float:
        started = time.perf_counter()
        # Of numpy's reductions the one that waits for nothing but memory; it releases the GIL.
        for _ in self._threads.map(np.max, self._parts):
            pass
        return time.perf_counter() - started

    def close(self) -> None:
        """Give the memory back."""
        self._threads.shutdown()
        self._parts.clear()


def environment(model: str | Path | None = None, **more: object) -> dict[str, Any]:
    """Machine, versions and model if there is one, without anything personal."""
    if model is not None:
        more = {"model": readable(Path(model).name), "model_sha256": _sha256(model), **more}
    lines = _read("/proc/cpuinfo").splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": date.today().isoformat(),
        "cpu": names[0] if names else platform.processor(),
        "cores": sum(line.startswith("processor") for line in lines),
        "python": platform.python_version(),
        "runtime": version(),
        **more,
    }


def _sha256(path: str | Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _largest_cache() -> int:
    """Bytes of the first CPU's largest cache; 0 where nobody knows."""
    sizes = (_read(path).strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    return max((int(size[:-1]) << 10 for size in sizes if size.endswith("K")), default=0)


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
