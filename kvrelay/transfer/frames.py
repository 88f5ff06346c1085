"""How blocks are cut into frames and put together again: spans, checksums, coverage. Pure; knows no transfer."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from awscrt.checksums import crc32c

from kvrelay.types import BlockRange

MAX_PAYLOAD_BYTES = 1024 * 1024
"""Of one frame, at most."""


class Span(NamedTuple):
    """A run of bytes of one block; ordered by block, then offset."""

    block: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        """Byte offset in the block behind the span."""
        return self.offset + self.length


def checksum(payload: bytes | memoryview, before: int = 0) -> int:
    """CRC-32C of `payload`; with `before`, that of what lies before it, of both together. Copies nothing."""
    value: int = crc32c(payload, before)
    return value


def spans_of(block: int, block_bytes: int, frame_bytes: int) -> Iterator[Span]:
    """One block's bytes in spans of nearly equal length, none longer than `frame_bytes`."""
    count = -(-block_bytes // frame_bytes)
    edges = [block_bytes * i // count for i in range(count + 1)]
    for start, end in zip(edges, edges[1:], strict=False):
        yield Span(block, start, end - start)


def ranges_of(blocks: Iterable[int]) -> tuple[BlockRange, ...]:
    """Ascending block indexes as maximal half-open ranges."""
    ranges: list[BlockRange] = []
    for block in blocks:
        if ranges and ranges[-1].end == block:
            ranges[-1] = BlockRange(ranges[-1].first, block + 1)
        else:
            ranges.append(BlockRange(block, block + 1))
    return tuple(ranges)


class Coverage:
    """Which bytes of one block have come, in any order and overlapping as they may."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._runs: list[tuple[int, int]] = []
        """Disjoint, not touching, ascending (start, end)."""

    def add(self, offset: int, length: int) -> None:
        """Bytes [offset, offset + length) have come."""
        start, end = offset, offset + length
        apart: list[tuple[int, int]] = []
        for run in self._runs:
            if run[1] < start or run[0] > end:
                apart.append(run)
            else:
                start, end = min(start, run[0]), max(end, run[1])
        self._runs = sorted([*apart, (start, end)])

    def touches(self, offset: int, length: int) -> bool:
        """Some of bytes [offset, offset + length) have come."""
        return any(start < offset + length and offset < end for start, end in self._runs)

    @property
    def complete(self) -> bool:
        """Every byte has come."""
        return self._runs == [(0, self.size)]
