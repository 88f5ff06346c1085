"""Blocks are cut and put together again without a gap."""

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


def test_the_checksum_is_crc32c() -> None:
    assert checksum(b"123456789") == 0xE3069283
