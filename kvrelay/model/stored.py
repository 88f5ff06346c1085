"""Converted weights on disk: one file a checkpoint, mapped into memory, so that services on one host share its pages.

File: MAGIC; the bytes of the tensors, each at a multiple of 64; the index as JSON; its length and crc32c (u64 each).
The index has a crc32c for each tensor. A file is written under another name and renamed: readers see all or nothing.
"""

import json
import logging
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from kvrelay.model.source import WeightSource

log = logging.getLogger(__name__)

MAGIC = b"kvrelay-weights1"
_TAIL = struct.Struct("<QQ")
_ALIGNMENT = 64
_PIECE = 1 << 24


@contextmanager
def stored(origin: WeightSource, identity: str, folder: Path | None) -> Iterator[WeightSource]:
    """A source of origin's tensors: from their file in `folder`, or, if it is not there yet, writing it.

    Without a folder the origin itself. identity: digest of the checkpoint.
    """
    if folder is None:
        yield origin
        return
    path = folder / f"{identity}.f32"
    try:
        found = StoredWeights(path, origin)
    except (OSError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("%s: %s; it is written anew", path, error)
        with StoringWeights(path, origin) as storing:
            yield storing
    else:
        yield found


class StoredWeights:
    """A stored file's tensors, read-only views of the mapping; what it lacks or has damaged comes from `origin`."""

    def __init__(self, path: Path, origin: WeightSource) -> None:
        """Raises OSError, ValueError: the file cannot be used."""
        self._origin, self._path = origin, path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._index = _read_index(memoryview(self._map))

    @property
    def where(self) -> str:
        return self._origin.where

    def tensor(self, name: str) -> Tensor | None:
        """f32. If the stored bytes are not what was written, the file is removed, and the origin asked."""
        entry = self._index.get(name)
        if entry is None:
            return self._origin.tensor(name)
        offset, shape, checksum = entry
        length = 4 * prod(shape)
        found = memoryview(self._map)[offset : offset + length]
        if len(found) != length or google_crc32c.value(np.frombuffer(found, np.uint8)) != checksum:
            log.warning("%s: tensor %s is damaged; the file is removed", self._path, name)
            self._path.unlink(missing_ok=True)
            self._index = {}
            return self._origin.tensor(name)
        return torch.frombuffer(found, dtype=torch.float32).view(shape)


class StoringWeights:
    """Hands on `origin`'s tensors and writes them down: `with StoringWeights(...)` stores the file if all went well.

    Whatever the file system refuses is logged, and nothing is stored then.
    """

    def __init__(self, path: Path, origin: WeightSource) -> None:
        self._path, self._origin = path, origin
        self._index: dict[str, list[Any]] = {}
        self._file: IO[bytes] | None = None

    @property
    def where(self) -> str:
        return self._origin.where

    def __enter__(self) -> Self:
        try:
            self._file = tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".writing-", delete=False)
            self._file.write(MAGIC)
        except OSError as error:
            self._give_up(error)
        return self

    def tensor(self, name: str) -> Tensor | None:
        """As the origin's."""
        tensor = self._origin.tensor(name)
        if self._file is not None and tensor is not None and tensor.dtype == torch.float32 and name not in self._index:
            try:
                self._write(self._file, name, tensor)
            except OSError as error:
                self._give_up(error)
        return tensor

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is None:
            return
        try:
            if error is None:
                self._publish(self._file)
                return
        except OSError as failure:
            error = failure
        self._give_up(error)

    def _write(self, file: IO[bytes], name: str, tensor: Tensor) -> None:
        file.write(bytes(-file.tell() % _ALIGNMENT))
        raw = tensor.contiguous().numpy().reshape(-1).view(np.uint8)
        self._index[name] = [file.tell(), list(tensor.shape), google_crc32c.value(raw)]
        for at in range(0, len(raw), _PIECE):
            file.write(raw[at : at + _PIECE].data)

    def _publish(self, file: IO[bytes]) -> None:
        index = json.dumps(self._index).encode()
        file.write(index + _TAIL.pack(len(index), google_crc32c.value(index)))
        file.flush()
        os.fsync(file.fileno())
        file.close()
        os.replace(file.name, self._path)

    def _give_up(self, error: BaseException | None) -> None:
        file, self._file = self._file, None
        log.warning("%s: not written: %s", self._path, error)
        if file is not None:
            file.close()
            Path(file.name).unlink(missing_ok=True)


def _read_index(data: memoryview) -> dict[str, Any]:
    if len(data) < len(MAGIC) + _TAIL.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError("not a weights file of this version")
    length, checksum = _TAIL.unpack(data[-_TAIL.size :])
    if length > len(data) - _TAIL.size:
        raise ValueError("truncated")
    raw = bytes(data[len(data) - _TAIL.size - length : len(data) - _TAIL.size])
    if google_crc32c.value(raw) != checksum:
        raise ValueError("its index is damaged")
    index: dict[str, Any] = json.loads(raw)
    return index
