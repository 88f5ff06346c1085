"""A payload lands where it may, read by read: in the pool, in staging memory, or nowhere."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager

import pytest

from kvrelay.transfer.carrier import Frame, Missing, Offer
from kvrelay.transfer.frames import MAX_PAYLOAD_BYTES, checksum
from kvrelay.transfer.landing import READ_BYTES, Landing
from kvrelay.transfer.receiver import IncomingTransfer, KvReceiver
from kvrelay.transfer.receiving import ReceivingLane
from tests.unit.transfer.rig import EPOCH, FakePool, layout_of

STAGING = memoryview(bytearray(MAX_PAYLOAD_BYTES))
LAYOUT = layout_of(512)
SIZE = LAYOUT.block_bytes
PAYLOAD = bytes(range(256)) * (SIZE // 256)


@asynccontextmanager
async def lanes(
    count: int = 1, *, in_place: bool
) -> AsyncIterator[tuple[FakePool, KvReceiver, IncomingTransfer, list[ReceivingLane]]]:
    """Lanes that have said what is missing: two blocks."""
    pool = FakePool(LAYOUT, 2, in_place=in_place)
    receiver = KvReceiver(pool, LAYOUT, epoch=EPOCH)
    incoming = receiver.expect("t1", range(2), 0)
    opened = [receiver.lane(Offer("t1", "r1", LAYOUT, 2, SIZE, EPOCH, number)) for number in range(count)]
    async with AsyncExitStack() as ends:
        for lane in opened:
            replies = await ends.enter_async_context(aclosing(lane.replies()))
            assert isinstance(await anext(replies), Missing)
            ends.callback(lane.close)
        yield pool, receiver, incoming, opened


def feed(landing: Landing, data: bytes) -> int:
    """As a socket does: never more at once than there is room for. How many reads it took."""
    reads = 0
    while data:
        room = landing.buffer()
        count = min(len(room), len(data))
        room[:count] = data[:count]
        landing.came(count)
        data, reads = data[count:], reads + 1
    return reads


async def test_a_payload_lands_in_its_block_in_a_few_reads() -> None:
    async with lanes(in_place=True) as (pool, _, incoming, (lane,)):
        landing = lane.land(Frame("t1", 1, 0, None, b""), SIZE, STAGING)
        assert feed(landing, PAYLOAD) == -(-SIZE // READ_BYTES)
        assert pool.read(1) == PAYLOAD
        assert not incoming.arrivals.is_whole(1)  # its checksum has not been looked at
        landing.finish(checksum(PAYLOAD))
        assert incoming.arrivals.is_whole(1)
        assert not pool.written


async def test_where_the_pool_cannot_be_written_in_place_it_is_copied_at_the_end() -> None:
    async with lanes(in_place=False) as (pool, _, incoming, (lane,)):
        landing = lane.land(Frame("t1", 1, 0, None, b""), SIZE, STAGING)
        feed(landing, PAYLOAD)
        assert not pool.touched
        landing.finish(checksum(PAYLOAD))
        assert pool.written == [(1, 0, SIZE)]
        assert incoming.arrivals.is_whole(1)


@pytest.mark.parametrize("in_place", [True, False])
async def test_after_the_end_the_rest_goes_nowhere(in_place: bool) -> None:
    async with lanes(in_place=in_place) as (pool, receiver, incoming, (lane,)):
        landing = lane.land(Frame("t1", 1, 0, None, b""), SIZE, STAGING)
        feed(landing, PAYLOAD[:1000])
        incoming.end()
        before = bytes(pool.bytes)
        feed(landing, PAYLOAD[1000:])
        landing.finish(checksum(PAYLOAD))
        assert pool.bytes == before
        assert receiver.stats.frames_late == 1
        assert not pool.written


async def test_an_abandoned_place_may_be_taken_by_another_lane() -> None:
    async with lanes(2, in_place=True) as (pool, _, _, (lane, other)):
        frame = Frame("t1", 0, 0, None, b"")
        stuck = lane.land(frame, SIZE, STAGING)
        feed(stuck, PAYLOAD[:1000])
        assert not other.land(frame, SIZE, STAGING).in_place
        lane.close()
        landing = other.land(frame, SIZE, STAGING)
        assert landing.in_place
        feed(landing, PAYLOAD)
        landing.finish(checksum(PAYLOAD))
        feed(stuck, bytes(SIZE - 1000))
        stuck.finish(0)
        assert pool.read(0) == PAYLOAD
