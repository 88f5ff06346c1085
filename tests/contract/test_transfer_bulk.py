"""What the receiving end of bulk connections may be told: who comes in, what they say, where bytes go."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvrelay.transfer import bulk_reader, bulk_wire
from kvrelay.transfer.carrier import BulkDoor, Frame, Missing, Offer
from kvrelay.transfer.frames import MAX_PAYLOAD_BYTES
from kvrelay.transfer.landing import Landing
from kvrelay.transfer.push import PushOutcome
from kvrelay.transfer.receiving import ReceivingLane
from tests.contract.bulk import BLOCK, doors_of, frame_of
from tests.unit.transfer.rig import EPOCH, Rig, rigged, until


class Visitor:
    """A lane's control, and a bulk connection that says what it is told to."""

    def __init__(self, lane: ReceivingLane, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.lane = lane
        self.reader = reader
        self.writer = writer
        self.door = BulkDoor("", 0, b"")

    def attach(self) -> None:
        self.writer.write(bulk_wire.attach(self.door.lane, self.door.token))

    def send(self, frame: Frame, until: int | None = None) -> None:
        """Its first bytes; or all of it and its checksum."""
        self.writer.write(bulk_wire.frame_header(self.door.lane, frame) + bytes(frame.payload[:until]))
        if until is None:
            self.check(frame)

    def check(self, frame: Frame) -> None:
        assert frame.crc32c is not None
        self.writer.write(bulk_wire.check(frame.crc32c))

    async def hung_up(self) -> bool:
        """The receiver closes the connection; whatever it said before is lost."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5.0):
                await self.reader.read()
        return True


@contextlib.asynccontextmanager
async def visiting(rig: Rig) -> AsyncIterator[Visitor]:
    """An admitted lane of t1, and a fresh connection."""
    offer = Offer("t1", "r1", rig.layout, rig.blocks, rig.layout.block_bytes, EPOCH, 0, bulk=True)
    lane = rig.receiver.lane(offer)
    replies = lane.replies()
    missing = await anext(replies)
    assert isinstance(missing, Missing) and missing.door is not None
    host, port = doors_of(rig).address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    visitor = Visitor(lane, reader, writer)
    visitor.door = missing.door
    try:
        yield visitor
    finally:
        await replies.aclose()
        lane.close()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def taken(rig: Rig, frames: int) -> None:
    await until(lambda: rig.receiver.stats.frames >= frames, 5.0)


async def test_a_wrong_token_closes_the_connection_and_nothing_is_taken() -> None:
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0), visiting(rig) as visitor:
        visitor.door = replace(visitor.door, token=bytes(16))
        visitor.attach()
        visitor.send(frame_of(rig, 0))
        assert await visitor.hung_up()
        assert not rig.pool.touched
        assert doors_of(rig).turned_away == 1


@pytest.mark.parametrize("token", [b"", b"short", bytes(500)])
async def test_a_token_of_another_length_is_as_wrong(token: bytes) -> None:
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0), visiting(rig) as visitor:
        visitor.door = replace(visitor.door, token=token)
        visitor.attach()
        assert await visitor.hung_up()


async def test_a_token_is_good_once() -> None:
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0), visiting(rig) as visitor:
        visitor.attach()
        visitor.send(frame_of(rig, 0))
        await taken(rig, 1)
        visitor.attach()
        assert await visitor.hung_up()
        assert rig.pool.touched == {0}


async def test_frames_before_a_token_close_the_connection() -> None:
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0), visiting(rig) as visitor:
        visitor.send(frame_of(rig, 0))
        assert await visitor.hung_up()
        assert not rig.pool.touched


async def test_a_token_ends_with_its_lane_and_whoever_comes_late_goes_nowhere() -> None:
    async with rigged("bulk") as rig:
        incoming = rig.receiver.expect("t1", range(8), 0)
        async with visiting(rig) as visitor:
            incoming.end()
            visitor.lane.close()
            visitor.attach()  # honest, but too late: no reason to hang up on the other lanes of this connection
            visitor.send(frame_of(rig, 0))
            visitor.attach()
            assert await visitor.hung_up()  # not twice, though
        assert not rig.pool.touched
        assert doors_of(rig).leftovers() == {"bulk_doors": 0}


async def test_a_connection_that_shows_no_token_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_reader, "STRANGER_S", 0.05)
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0), visiting(rig) as visitor:
        assert await visitor.hung_up()


@pytest.mark.parametrize(
    "noise",
    [
        b"\xff\xff" + bytes(10),
        b"\x00\x04\xff\xff\xff\xff",
        b"\x00\x00",
        b"GET / HTTP/1.1\r\n\r\n" + bytes(2000),
    ],
    ids=["too long", "no message", "empty message", "another protocol"],
)
async def test_noise_closes_the_connection(noise: bytes) -> None:
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0), visiting(rig) as visitor:
        visitor.writer.write(noise)
        assert await visitor.hung_up()
        assert doors_of(rig).connections == set()


async def test_a_checksum_without_a_payload_closes_the_connection() -> None:
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0), visiting(rig) as visitor:
        visitor.attach()
        visitor.writer.write(bulk_wire.check(1))
        assert await visitor.hung_up()


async def test_a_payload_without_its_checksum_closes_the_connection_and_counts_for_nothing() -> None:
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0) as incoming:
        async with visiting(rig) as visitor:
            visitor.attach()
            visitor.send(frame_of(rig, 0), BLOCK)
            visitor.send(frame_of(rig, 1))
            assert await visitor.hung_up()
        assert not incoming.arrivals.is_whole(0)
        assert (await rig.push().done()).outcome is PushOutcome.COMMITTED
        assert rig.arrived


async def test_a_payload_beyond_the_limit_closes_the_connection() -> None:
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0), visiting(rig) as visitor:
        visitor.attach()
        visitor.send(Frame("t1", 0, 0, 0, bytes(MAX_PAYLOAD_BYTES + 1)), 10)
        assert await visitor.hung_up()
        assert not rig.pool.touched


async def test_a_connection_cut_in_the_middle_of_a_frame_fails_its_lane_and_frees_the_place() -> None:
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0) as incoming:
        async with visiting(rig) as visitor:
            visitor.attach()
            visitor.send(frame_of(rig, 3), 4000)
            await until(lambda: rig.pool.touched)
            assert not incoming.arrivals.claim(3, 0, BLOCK)
            visitor.writer.transport.abort()
            await until(lambda: incoming.arrivals.claim(3, 0, BLOCK))
            incoming.arrivals.unclaim(3, 0, BLOCK)
        assert (await rig.push().done()).outcome is PushOutcome.COMMITTED
        assert rig.arrived


async def test_a_large_payload_that_trickles_in_wakes_the_receiver_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    size, trickle = 1 << 20, 8192
    reads: list[int] = []
    came = Landing.came

    def counted(self: Landing, count: int) -> None:
        reads.append(count)
        came(self, count)

    monkeypatch.setattr(Landing, "came", counted)
    async with rigged("bulk", blocks=2, block_kib=1024) as rig, rig.receiver.expect("t1", range(2), 0):
        async with visiting(rig) as visitor:
            visitor.attach()
            for block in range(2):
                frame = frame_of(rig, block, length=size)
                for start in range(0, size, trickle):
                    piece = bytes(frame.payload[start : start + trickle])
                    visitor.writer.write(piece if start else bulk_wire.frame_header(visitor.door.lane, frame) + piece)
                    await visitor.writer.drain()
                    await asyncio.sleep(0)
                visitor.check(frame)
                await taken(rig, block + 1)
        assert rig.arrived
    assert sum(reads) == 2 * size
    assert len(reads) < 40  # of 256 pieces


@pytest.mark.parametrize("how", ["the leg ends", "the lane closes"])
async def test_the_rest_of_a_frame_that_was_begun_is_not_written_after_the_end(how: str) -> None:
    async with rigged("bulk") as rig:
        incoming = rig.receiver.expect("t1", range(8), 0)
        async with visiting(rig) as visitor:
            visitor.attach()
            frame = frame_of(rig, 3)
            visitor.send(frame, 4000)
            await until(lambda: rig.pool.touched)
            if how == "the leg ends":
                incoming.end()
            else:
                visitor.lane.close()
            before = bytes(rig.pool.bytes)
            visitor.writer.write(bytes(frame.payload[4000:]))
            visitor.check(frame)
            visitor.send(frame_of(rig, 4))  # the connection is still in step
            visitor.writer.write(b"\xff\xff")
            assert await visitor.hung_up()
            assert rig.pool.bytes == before
        incoming.end()


async def test_a_checksum_that_comes_after_the_end_completes_nothing() -> None:
    async with rigged("bulk") as rig:
        incoming = rig.receiver.expect("t1", range(8), 0)
        async with visiting(rig) as visitor:
            visitor.attach()
            frame = frame_of(rig, 3)
            visitor.send(frame, BLOCK)
            await until(lambda: rig.pool.read(3) == frame.payload)
            incoming.end()
            visitor.check(frame)
            await until(lambda: rig.receiver.stats.frames_late == 1)
            assert incoming.blocks_received == 0
            assert doors_of(rig).turned_away == 0


async def test_a_damaged_copy_cannot_spoil_what_has_come() -> None:
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0) as incoming:
        async with visiting(rig) as visitor:
            visitor.attach()
            visitor.send(frame_of(rig, 0, length=5000))
            await taken(rig, 1)
            wrong = frame_of(rig, 0, offset=100, damage=1)
            visitor.send(replace(wrong, payload=bytes(len(wrong.payload))))
            await until(lambda: rig.receiver.stats.crc_errors == 1)
            assert rig.pool.bytes[:5000] == rig.source.bytes[:5000]
            assert not incoming.is_committed
        assert (await rig.push().done()).outcome is PushOutcome.COMMITTED
        assert rig.arrived


async def test_a_good_copy_does_not_complete_a_block_that_is_being_written_in_place() -> None:
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0) as incoming:
        async with visiting(rig) as slow, visiting(rig) as quick:
            slow.attach()
            slow.send(replace(frame_of(rig, 2), payload=bytes(BLOCK - 1) + b"\1"), 4000)
            quick.attach()
            await until(lambda: not incoming.arrivals.claim(2, 0, BLOCK) or incoming.arrivals.unclaim(2, 0, BLOCK))
            quick.send(frame_of(rig, 2))
            await taken(rig, 1)
            assert rig.receiver.stats.frames_repeated == 1
            assert not incoming.arrivals.is_whole(2)
        assert (await rig.push().done()).outcome is PushOutcome.COMMITTED
        assert rig.arrived
