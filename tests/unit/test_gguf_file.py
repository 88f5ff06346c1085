"""The header reader agrees with the gguf library, and says what is wrong with a broken file."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay import checkpoint
from kvrelay.errors import ModelFileError
from kvrelay.gguf_file import open_gguf


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "good.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("a.string", "déjà vu")
    writer.add_uint8("a.uint8", 200)
    writer.add_int32("a.int32", -5)
    writer.add_int64("a.int64", -(1 << 40))
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_array("a.strings", ["x", "", "日本"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("first", np.arange(12, dtype=np.float32).reshape(3, 4))
    writer.add_tensor("second", np.arange(5, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_kind_of_value_is_read(good: Path) -> None:
    metadata = open_gguf(good).metadata
    assert {key: value for key, value in metadata.items() if key.startswith("a.")} == {
        "a.string": "déjà vu",
        "a.uint8": 200,
        "a.int32": -5,
        "a.int64": -(1 << 40),
        "a.float32": 0.5,
        "a.float64": 0.1,
        "a.bool": True,
        "a.strings": ["x", "", "日本"],
        "a.numbers": [1, 2, 3],
    }


def test_tensors_lie_where_the_library_finds_them(good: Path) -> None:
    file = open_gguf(good)
    for tensor in gguf.GGUFReader(good).tensors:
        ours = file.tensors[tensor.name]
        assert ours.offset == tensor.data_offset
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.quantization == tensor.tensor_type


def test_the_packaged_model_is_read_as_the_library_reads_it() -> None:
    path = checkpoint.resolve("smollm2").directory
    file, reference = open_gguf(path), gguf.GGUFReader(path)
    wanted = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata == wanted
    assert {name: one.offset for name, one in file.tensors.items()} == {
        one.name: one.data_offset for one in reference.tensors
    }


@pytest.mark.parametrize("kind", [list, str, bool])
def test_a_value_of_another_kind_is_named(good: Path, kind: type) -> None:
    with pytest.raises(ModelFileError, match=f"a.int32 is int, not {kind.__name__}"):
        open_gguf(good).need("a.int32", kind)
    with pytest.raises(ModelFileError, match="b.nothing is missing"):
        open_gguf(good).need("b.nothing", kind)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "cannot be read"),
        (b"GG", "begins with"),
        (b"PK\x03\x04 a zip file", "begins with"),
        (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1), "unpack_from"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 60), "reaches beyond"),
        (b"GGUF" + struct.pack("<IQQQsIIQ", 3, 0, 1, 1, b"k", 9, 8, 1 << 60), "array of"),
        (b"GGUF" + struct.pack("<IQQQsI", 3, 0, 1, 1, b"k", 77), "unknown type 77"),
        (b"GGUF" + struct.pack("<IQQQsI", 3, 0, 1, 1, b"\xff", 4), "utf-8"),
        (b"GGUF" + struct.pack("<IQQQsI", 3, 1, 0, 1, b"t", 99), "99 dimensions"),
    ],
)
def test_a_broken_header_is_refused_by_file_and_cause(tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=f"broken.gguf: .*{named}"):
        open_gguf(path)


@given(data=st.data())
def test_a_header_with_any_bytes_changed_is_read_or_refused_but_never_crashes(good: Path, data: st.DataObject) -> None:
    content = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    path = good.with_name("changed.gguf")
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        open_gguf(path)
    except ModelFileError as error:
        assert "changed.gguf" in str(error)
