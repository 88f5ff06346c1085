"""The GGUF container: metadata and where each tensor's bytes lie. Knows no model, no tokenizer, no torch.

Own code beside the `gguf` package (which dequantizes): its reader makes an array object of every token of the
vocabulary, 3 s for SmolLM2, where this one takes a tenth of a second, and the router reads the tokenizer too.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvrelay.errors import ModelFileError

T = TypeVar("T")

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Row-major, slowest first (the file has it the other way round)."""
    quantization: int
    """ggml type number, as gguf.GGMLQuantizationType."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file; the mapping lives as long as the object."""

    path: Path
    metadata: dict[str, Any]
    """Scalars, strings, and lists of them."""
    tensors: dict[str, GgufTensor]
    data: mmap.mmap
    """The whole file."""
    header_bytes: int
    """Length of magic, counts and metadata, before the tensors' table."""

    def get(self, key: str, kind: type[T]) -> T | None:
        """A metadata value; None if the file has none. Raises ModelFileError if it is of another kind."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            raise ModelFileError(f"{self.path}: {key} is {type(value).__name__}, not {kind.__name__}")
        return value

    def need(self, key: str, kind: type[T]) -> T:
        """As get; a missing value is a ModelFileError too."""
        value = self.get(key, kind)
        if value is None:
            raise ModelFileError(f"{self.path}: {key} is missing")
        return value


def open_gguf(path: Path) -> GgufFile:
    """Reads the header. Raises ModelFileError naming file and cause."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from error
    try:
        return _parse(path, data)
    except (struct.error, UnicodeDecodeError, OverflowError, RecursionError, _Bad) as error:
        raise ModelFileError(f"{path}: corrupt or truncated GGUF header: {error}") from error


def eos_token_ids(file: GgufFile) -> tuple[int, ...]:
    """The ids that end an answer: the end of sequence, and the end of a turn where that is another id."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    ids = [value for key in keys if (value := file.get(key, int)) is not None]
    return tuple(dict.fromkeys(ids))


class _Bad(Exception):
    """Something that no GGUF file holds."""


class _Cursor:
    """Reads little-endian values from a buffer, one after the other."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        end = self.at + size
        if end > len(self.data):
            raise _Bad(f"a string of {size} bytes at byte {self.at} reaches beyond the file's {len(self.data)}")
        raw = self.data[self.at : end]
        self.at = end
        return raw.decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        if kind not in _SCALARS:
            raise _Bad(f"value of unknown type {kind} at byte {self.at}")
        return self.scalar(_SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if count > len(self.data) - self.at:
            raise _Bad(f"an array of {count} items at byte {self.at} in a file of {len(self.data)} bytes")
        if kind in _SCALARS:
            layout = struct.Struct(f"<{count}{_SCALARS[kind]}")
            values = layout.unpack_from(self.data, self.at)
            self.at += layout.size
            return list(values)
        read: Callable[[], Any] = self.string if kind == _STRING else lambda: self.value(kind)
        return [read() for _ in range(count)]


def _parse(path: Path, data: mmap.mmap) -> GgufFile:
    cursor = _Cursor(data)
    if data[:4] != MAGIC:
        raise _Bad(f"begins with {data[:4]!r}, not {MAGIC!r}")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise _Bad(f"version {version}; supported are {VERSIONS}")
    tensor_count, value_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(value_count)}
    header_bytes = cursor.at
    found = [_tensor(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Bad(f"general.alignment is {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: GgufTensor(name, shape, kind, start + offset) for name, shape, kind, offset in found}
    return GgufFile(path, metadata, tensors, data, header_bytes)


def _tensor(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, dimensions = cursor.string(), cursor.scalar("I")
    if dimensions > _MAX_DIMENSIONS:
        raise _Bad(f"tensor {name!r} has {dimensions} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]
    return name, shape, cursor.scalar("I"), cursor.scalar("Q")
