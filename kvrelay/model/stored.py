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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from awscrt import checksums
from torch import Tensor

from kvrelay.cache_folder import exclusive
from kvrelay.fallbacks import fall_back
from kvrelay.model.source import WeightSource

log = logging.getLogger(__name__)

MAGIC = b"kvrelay-weights1"
_TAIL = struct.Struct("<QQ")
_ALIGNMENT = 64
_PIECE = 1 << 24


class Convertible(WeightSource, Protocol):
    """A checkpoint that can tell what it holds."""

    def names(self) -> Iterable[str]:
        """Of all its tensors."""
        ...


@contextmanager
def stored(origin: Convertible, identity: str, folder: Path | None) -> Iterator[WeightSource]:
    """A source of origin's tensors in float32: from their file in `folder`, which is written when it is not there.

    The origin itself if there is no folder, or the file cannot be written. identity: digest of the checkpoint.
    """
    if folder is None:
        yield origin
        return
    with exclusive(folder):
        found = _opened(folder / f"{identity}.f32", origin)
    if found is None:
        yield origin
        return
    try:
        yield found
    finally:
        found.let_go()


def write(path: Path, origin: Convertible) -> None:
    """Writes the file, one tensor in memory at a time. Raises OSError, and leaves nothing then."""
    index: dict[str, list[Any]] = {}
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
        try:
            file.write(MAGIC)
            for name in origin.names():
                tensor = origin.tensor(name)
                if tensor is not None:
                    index[name] = _append(file, tensor)
            tail = json.dumps(index).encode()
            file.write(tail + _TAIL.pack(len(tail), checksums.crc32c(tail)))
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _append(file: IO[bytes], tensor: Tensor) -> list[Any]:
    """The tensor's entry in the index."""
    file.write(bytes(-file.tell() % _ALIGNMENT))
    raw = tensor.float().contiguous().numpy().reshape(-1).view(np.uint8)
    entry = [file.tell(), list(tensor.shape), checksums.crc32c(raw)]
    for at in range(0, len(raw), _PIECE):
        file.write(raw[at : at + _PIECE].data)
    return entry


def _opened(path: Path, origin: Convertible) -> "StoredWeights | None":
    try:
        return StoredWeights(path, origin)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        fall_back(log, "weights_unreadable", "%s: %s; it is written anew", path, error)
    try:
        write(path, origin)
        return StoredWeights(path, origin)
    except (OSError, ValueError) as error:
        fall_back(log, "weights_not_stored", "%s: not written: %s", path, error)
        return None


class StoredWeights:
    """A stored file's tensors, read-only views of the mapping; what it lacks or has damaged comes from `origin`."""

    def __init__(self, path: Path, origin: WeightSource) -> None:
        """Raises OSError, ValueError: the file cannot be used."""
        self._origin, self._path = origin, path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._index = _read_index(memoryview(self._map))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)

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
        if len(found) != length or checksums.crc32c(found) != checksum:
            fall_back(log, "weights_damaged", "%s: tensor %s is damaged; the file is removed", self._path, name)
            self._path.unlink(missing_ok=True)
            self._index = {}
            return self._origin.tensor(name)
        return self._bytes[offset : offset + length].view(torch.float32).view(shape)

    def let_go(self) -> None:
        """Unused pages need not stay in memory; those that are still used come back from the file."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _read_index(data: memoryview) -> dict[str, Any]:
    if len(data) < len(MAGIC) + _TAIL.size or data[: len(MAGIC)] != MAGIC:
        raise ValueError("not a weights file of this version")
    length, checksum = _TAIL.unpack(data[-_TAIL.size :])
    if length > len(data) - _TAIL.size:
        raise ValueError("truncated")
    raw = bytes(data[len(data) - _TAIL.size - length : len(data) - _TAIL.size])
    if checksums.crc32c(raw) != checksum:
        raise ValueError("its index is damaged")
    index: dict[str, Any] = json.loads(raw)
    return index
