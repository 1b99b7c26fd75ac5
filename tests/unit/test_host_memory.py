"""A cache that does not fit is refused before it is allocated, with the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_gguf import host_memory
from h2o_gguf.errors import OutOfMemoryError

MEMINFO = "MemTotal: 9000 kB\nMemFree: 1000 kB\nMemAvailable: 4000 kB\nSwapFree: 96 kB\nHugePages_Total: 0\n"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """4,096 KiB are available, and there is no control group."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "CONTROL_GROUP", tmp_path)
    return tmp_path


def test_available_is_what_the_kernel_says_and_swap() -> None:
    assert host_memory.available_bytes() == 4096 * 1024


@pytest.mark.parametrize(("limit", "n_bytes"), [("max", 4096 * 1024), ("3000000", 2_500_000), ("100", 0)])
def test_a_container_has_what_its_group_leaves(machine: Path, limit: str, n_bytes: int) -> None:
    (machine / "memory.max").write_text(f"{limit}\n")
    (machine / "memory.current").write_text("700000\n")
    (machine / "memory.stat").write_text("anon 500000\nfile 200000\n")
    assert host_memory.available_bytes() == n_bytes


def test_without_the_kernels_word_all_there_is_counts(machine: Path) -> None:
    (machine / "meminfo").unlink()
    found = host_memory.available_bytes()
    assert found is None or found > 4096 * 1024


def test_what_does_not_fit_is_refused_with_both_numbers() -> None:
    host_memory.require_bytes(4096 * 1024, 256, has_budget=True)
    with pytest.raises(OutOfMemoryError, match=r"4,194,305 bytes and 4,194,304 .*lower kv_budget") as caught:
        host_memory.require_bytes(4096 * 1024 + 1, 256, has_budget=True)
    assert (caught.value.n_bytes, caught.value.n_available) == (4096 * 1024 + 1, 4096 * 1024)
    with pytest.raises(OutOfMemoryError, match="lower n_ctx"):
        host_memory.require_bytes(1 << 40, 256, has_budget=False)
