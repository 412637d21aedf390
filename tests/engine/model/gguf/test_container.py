"""The container of GGUF files: what is read equals what llama.cpp's package wrote, and damaged files are named."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from pilotfish.engine.errors import ModelError
from pilotfish.engine.model.gguf.container import Container, Strings, gguf_file
from tests import gguf_files


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    return gguf_files.write(path, gguf_files.llama(), Type.Q8_0, _describe).path


def _describe(writer: gguf.GGUFWriter) -> None:
    writer.add_string("our.text", "naïve ▁")
    writer.add_array("our.words", ["a", "bc", ""])
    writer.add_array("our.numbers", [1, 2, 70_000])
    writer.add_bool("our.truth", True)
    writer.add_float32("our.float", 0.1)
    writer.add_float64("our.double", 1e-300)
    writer.add_int64("our.long", -(1 << 40))


def test_reads_what_the_package_reads(file: Path) -> None:
    ours, theirs = Container.open(file), gguf.GGUFReader(file)
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert (found.kind.name, found.start, found.num_bytes) == (
            tensor.tensor_type.name,
            tensor.data_offset,
            tensor.n_bytes,
        )
    assert ours.get("our.text", str) == "naïve ▁"
    assert list(ours.strings("our.words")) == ["a", "bc", ""]
    assert isinstance(ours.metadata["our.words"], Strings), "which stay in the file"
    assert ours.get("our.numbers", np.ndarray).tolist() == [1, 2, 70_000]
    assert ours.get("our.truth", bool) is True
    assert ours.get("our.float", float) == 0.1, "as it was before it was rounded to float32"
    assert ours.get("our.double", float) == 1e-300
    assert ours.get("our.long", int) == -(1 << 40)
    assert set(ours.metadata) == {key for key in theirs.fields if not key.startswith("GGUF.")}


def test_values_of_another_kind_and_missing_ones_are_named(file: Path) -> None:
    container = Container.open(file)
    with pytest.raises(ModelError, match=r"our\.text is 'naïve ▁'; expected an integer"):
        container.get("our.text", int)
    with pytest.raises(ModelError, match=r"has no our\.nothing"):
        container.need("our.nothing", int)
    assert not container.strings("our.nothing")


def test_version_2_is_the_same(file: Path, tmp_path: Path) -> None:
    (tmp_path / "old.gguf").write_bytes(_put(4, struct.pack("<I", 2))(file.read_bytes()))
    old, new = Container.open(tmp_path / "old.gguf"), Container.open(file)
    assert list(old.strings("our.words")) == list(new.strings("our.words"))
    assert [old.get("our.text", str), old.tensors.keys()] == [new.get("our.text", str), new.tensors.keys()]


def _cut(share: float) -> Callable[[bytes], bytes]:
    return lambda whole: whole[: int(len(whole) * share)]


def _put(at: int, put: bytes) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:at] + put + whole[at + len(put) :]


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [(_cut(share), "is (truncated|not a GGUF file)") for share in (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.3, 0.999)]
    + [
        (_put(0, b"GGML"), "begins with b'GGML'"),
        (_put(4, struct.pack("<I", 1)), "GGUF of version 1"),
        (_put(4, struct.pack(">I", 3)), "big-endian"),
        (_put(8, struct.pack("<Q", 1 << 60)), "declares 1152921504606846976 tensors; expected at most 65536"),
        (_put(16, struct.pack("<Q", 1 << 60)), "declares 1152921504606846976 metadata values; expected at most 65536"),
        (_put(24, struct.pack("<Q", 1 << 63)), "truncated or damaged"),
    ],
)
def test_damage_is_named(damage: Callable[[bytes], bytes], complaint: str, file: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(damage(file.read_bytes()))
    with pytest.raises(ModelError, match=rf"bad\.gguf.*{complaint}"):
        Container.open(tmp_path / "bad.gguf")


def test_random_damage_to_the_header_never_raises_anything_else(file: Path, tmp_path: Path) -> None:
    whole, chance = file.read_bytes(), np.random.default_rng(0)
    header = Container.open(file).header_bytes
    for number in range(100):
        data = bytearray(whole[: header + 64])
        for at in chance.integers(0, header, 4):
            data[at] = chance.integers(256)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"\d+\.gguf"):  # at least its tensors are not there
            Container.open(path)


def _tensor(path: Path, kind: Type, rows: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("a.weight", rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = _tensor(tmp_path / "model.gguf", Type.I8, np.zeros((2, 84), np.int8))
    with pytest.raises(ModelError, match=r"a\.weight has type I8; supported: F32, F16"):
        Container.open(path)


def test_a_file_is_read_again_where_it_changed(tmp_path: Path) -> None:
    path = _tensor(tmp_path / "model.gguf", Type.F32, np.zeros((2, 4), np.float32))
    assert Container.open(path) is Container.open(path)
    assert Container.open(_tensor(path, Type.F32, np.zeros((3, 4), np.float32))).tensors["a.weight"].shape == (3, 4)


def test_names_of_files(file: Path, tmp_path: Path) -> None:
    assert gguf_file(str(file)) == file
    assert gguf_file(file.parent) == file, "a folder with one file"
    assert gguf_file("someone/model") is None
    assert gguf_file(tmp_path) is None
    with pytest.raises(ModelError, match="no such file"):
        gguf_file(str(tmp_path / "missing.gguf"))
    with pytest.raises(ModelError, match="is one of 99999 parts; expected at most 1024"):
        Container.open(tmp_path / "a-00001-of-99999.gguf")
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"has 2 GGUF files; pass the path of one: a\.gguf, b\.gguf"):
        gguf_file(tmp_path)
    (tmp_path / "config.json").touch()
    assert gguf_file(tmp_path) is None, "beside another checkpoint"
