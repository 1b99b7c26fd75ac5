"""A library that uses instructions this CPU lacks is refused in words, instead of ending the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o_gguf.bindings import cpu, library
from h2o_gguf.errors import NATIVE, LibraryError

# Of a Haswell (2013), the first with AVX2, and of a Sandy Bridge (2011).
HASWELL = "fpu sse sse2 ssse3 pni fma movbe sse4_1 sse4_2 popcnt avx f16c abm bmi1 avx2 bmi2"
SANDY_BRIDGE = "fpu sse sse2 ssse3 pni sse4_1 sse4_2 popcnt avx"
NEEDED = "avx avx2 bmi2 f16c fma popcnt sse3 sse4_1 sse4_2 ssse3\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a library compiled for AVX2 lies, on a Haswell."""
    (tmp_path / cpu.FEATURES).write_text(NEEDED)
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {HASWELL}\nbugs\t\t: mds\n" * 2)
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    return tmp_path


def test_a_cpu_that_has_all_is_taken(folder: Path) -> None:
    assert cpu.missing_features(folder) == []


def test_what_a_cpu_lacks_is_named(folder: Path) -> None:
    (folder / "cpuinfo").write_text(f"flags : {SANDY_BRIDGE}\n")
    assert cpu.missing_features(folder) == ["avx2", "bmi2", "f16c", "fma"]


@pytest.mark.parametrize(
    ("compilers", "linuxs"),
    [("avx512vnni", "avx512_vnni"), ("avxvnni", "avx_vnni"), ("lzcnt", "abm"), ("bmi", "bmi1"),
     ("sse3", "pni"), ("amx_tile", "amx_tile"), ("avx512f", "avx512f")],
)  # fmt: skip
def test_the_compilers_names_are_linuxs(folder: Path, compilers: str, linuxs: str) -> None:
    (folder / cpu.FEATURES).write_text(compilers)
    (folder / "cpuinfo").write_text(f"flags : {linuxs}\n")
    assert cpu.missing_features(folder) == []
    (folder / "cpuinfo").write_text("flags : fpu\n")
    assert cpu.missing_features(folder) == [compilers]


@pytest.mark.parametrize("unknown", ["cpuinfo", cpu.FEATURES])
def test_where_one_side_is_unknown_nothing_is_refused(folder: Path, unknown: str) -> None:
    (folder / "cpuinfo").write_text("flags : fpu\n")
    (folder / unknown).unlink()
    assert cpu.missing_features(folder) == []


def test_a_cpu_that_lists_no_flags_is_not_refused(folder: Path) -> None:
    (folder / "cpuinfo").write_text("processor : 0\nFeatures : fp asimd\n")
    assert cpu.missing_features(folder) == []


def test_the_library_is_refused_before_it_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / library.FILE).write_bytes(b"no library at all")
    (folder / "cpuinfo").write_text(f"flags : {SANDY_BRIDGE}\n")
    monkeypatch.setenv("H2O_GGUF_LIB_PATH", str(folder))
    with pytest.raises(
        LibraryError, match=r"lacks \(avx2, bmi2, f16c, fma\): build it on this machine"
    ) as caught:
        library.lib.__wrapped__()
    assert caught.value.exit_code == NATIVE
