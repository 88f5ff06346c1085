"""Blocks are cut and put together again without a gap."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.transfer.frames import Coverage, checksum, ranges_of, spans_of
from kvrelay.types import BlockRange


@given(st.integers(1, 5000), st.integers(1, 700))
def test_spans_tile_a_block_and_are_never_longer_than_a_frame(block_bytes: int, frame_bytes: int) -> None:
    spans = list(spans_of(3, block_bytes, frame_bytes))
    assert [s.block for s in spans] == [3] * len(spans)
    assert [s.offset for s in spans] == [0, *[s.end for s in spans[:-1]]]
    assert spans[-1].end == block_bytes
    assert all(0 < s.length <= frame_bytes for s in spans)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=30), st.integers(1, 60))
def test_coverage_is_the_set_of_bytes_that_came(pieces: list[tuple[int, int]], size: int) -> None:
    coverage, came = Coverage(size), set[int]()
    for offset, length in pieces:
        length = min(length, size - offset)
        if length <= 0:
            continue
        coverage.add(offset, length)
        came.update(range(offset, offset + length))
        assert coverage.complete == (len(came) == size)


@given(st.sets(st.integers(0, 60)))
def test_ranges_are_maximal_and_hold_exactly_the_blocks(blocks: set[int]) -> None:
    ranges = ranges_of(sorted(blocks))
    assert [b for r in ranges for b in range(r.first, r.end)] == sorted(blocks)
    assert all(a.end < b.first for a, b in zip(ranges, ranges[1:], strict=False))


def test_no_blocks_are_no_ranges() -> None:
    assert ranges_of([]) == ()
    assert ranges_of([2, 3, 5]) == (BlockRange(2, 4), BlockRange(5, 6))


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_the_checksum_is_crc32c_as_rfc_3720_has_it(payload: bytes, expected: int) -> None:
    assert checksum(payload) == expected


def bitwise(payload: memoryview, before: int = 0) -> int:
    """CRC-32C by its definition."""
    crc = before ^ 0xFFFFFFFF
    for byte in payload:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_checksum_is_by_definition_at_every_length_and_alignment() -> None:
    data = memoryview(random.Random(3).randbytes(2048)).toreadonly()
    for start in (0, 1, 7, 33):
        expected = 0
        for end in range(start, len(data) + 1):
            assert checksum(data[start:end]) == expected, (start, end)
            expected = bitwise(data[end : end + 1], expected)


@given(st.integers(0, 1_200_000), st.integers(0, 1_200_000))
def test_the_checksum_of_two_parts_is_that_of_the_whole(length: int, cut: int) -> None:
    data = memoryview(random.Random(length).randbytes(length))
    assert checksum(data[cut:], checksum(data[:cut])) == checksum(data)


def test_the_checksum_of_a_large_payload_is_that_of_its_small_pieces() -> None:
    data = memoryview(random.Random(5).randbytes(1_100_003))
    pieces = 0
    for start in range(0, len(data), 1000):
        pieces = checksum(data[start : start + 1000], pieces)
    assert checksum(data) == pieces
