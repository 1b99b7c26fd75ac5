"""Headers: what is read, and that every broken file is refused in words and nothing else is raised."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import build

from h2o_gguf.errors import H2OError, ModelFileError
from h2o_gguf.models.header import LongArray, read_header


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("header") / "llama.gguf", n_layer=1)


def refused(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_header(path)
    assert isinstance(caught.value, H2OError) and isinstance(caught.value, OSError)
    assert caught.value.path == str(path)
    assert str(path) in str(caught.value)
    return caught.value.reason


def test_metadata_and_tensors_equal_the_reference_reader(whole: Path) -> None:
    ours, theirs = read_header(whole), gguf.GGUFReader(whole)
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value = field.contents()
        assert ours.metadata[key] == (tuple(value) if isinstance(value, list) else value), key
    want = {t.name: (t.data_offset, t.n_bytes, tuple(t.shape), t.tensor_type.name) for t in theirs.tensors}
    assert want == {t.name: (t.offset, t.n_bytes, t.shape, t.type_name) for t in ours.tensors.values()}
    assert ours.architecture == "llama"
    assert ours.get("block_count") == 1
    assert ours.get("no.such.key", 7) == 7


def test_long_arrays_are_counted_not_decoded(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("strings", [f"token {i}" for i in range(5000)])
    writer.add_array("numbers", [float(i) for i in range(5000)])
    writer.add_array("short", [1, 2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_header(path).metadata
    assert metadata["strings"] == LongArray(5000)
    assert metadata["numbers"] == LongArray(5000)
    assert metadata["short"] == (1, 2, 3)


def test_missing_file(tmp_path: Path) -> None:
    assert "no such file" in refused(tmp_path / "none.gguf")


def test_folder(tmp_path: Path) -> None:
    assert "folder" in refused(tmp_path)


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    assert "empty" in refused(path)


def test_four_bytes(tmp_path: Path) -> None:
    path = tmp_path / "four.gguf"
    path.write_bytes(b"GGUF")
    assert "4 bytes" in refused(path)


def test_wrong_magic(tmp_path: Path) -> None:
    path = tmp_path / "zip.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    assert "not a GGUF file" in refused(path)


def test_cut_at_60_percent_names_both_sizes(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: len(data) * 6 // 10])
    reason = refused(path)
    assert f"{len(data) * 6 // 10} bytes" in reason
    assert "cut off" in reason and "not within the file" in reason


def test_every_cut_of_the_header_is_refused(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    start = min(tensor.offset for tensor in read_header(whole).tensors.values())
    path = tmp_path / "cut.gguf"
    for n in range(1, start, 97):
        path.write_bytes(data[:n])
        assert refused(path)


def test_one_missing_byte_is_noticed(whole: Path, tmp_path: Path) -> None:
    data = whole.read_bytes()
    tensors = read_header(whole).tensors.values()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: max(t.offset + t.n_bytes for t in tensors) - 1])
    assert "cut off" in refused(path)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "nonesuch")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "unknown architecture 'nonesuch'" in refused(path)


def test_projector_file_is_no_language_model(tmp_path: Path) -> None:
    path = tmp_path / "mmproj.gguf"
    writer = gguf.GGUFWriter(path, "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "projector" in refused(path)


@pytest.mark.parametrize(
    ("version", "says"), [(1, "version is 1"), (99, "version is 99"), (3 << 24, "big-endian")]
)
def test_other_versions_are_refused(tmp_path: Path, version: int, says: str) -> None:
    path = tmp_path / "version.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0) + bytes(64))
    assert says in refused(path)


def test_counts_beyond_the_file_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "counts.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 60) + bytes(64))
    assert "claims" in refused(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_bytes_raise_nothing_but_model_file_error(
    whole: Path, tmp_path: Path, data: st.DataObject
) -> None:
    content = bytearray(whole.read_bytes()[:16384])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(4, 9000))
        content[at] = data.draw(st.integers(0, 255))
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError):  # it is cut off as well, so it is always refused
        read_header(path)


def test_file_is_closed_after_reading(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Watched(mmap.mmap):
        def __init__(self, *_args: object, **_options: object) -> None:
            made.append(self)

    monkeypatch.setattr("h2o_gguf.models.header.mmap.mmap", Watched)
    read_header(whole)
    assert [one.closed for one in made] == [True]
