"""What only bulk connections can do wrong: who comes in, what they say, where bytes go, what happens without them."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from kvrelay.transfer import bulk_carrier, bulk_server, bulk_wire
from kvrelay.transfer.bulk_carrier import BulkCarriers
from kvrelay.transfer.bulk_connection import BulkConnection, connect
from kvrelay.transfer.bulk_server import BulkServer
from kvrelay.transfer.carrier import BulkDoor, Ended, EndReason, Frame, Lane, Missing, Offer, OnAck
from kvrelay.transfer.frames import MAX_PAYLOAD_BYTES, checksum
from kvrelay.transfer.push import PushOutcome
from kvrelay.transfer.receiving import ReceivingLane
from kvrelay.wan.settings import WanSettings
from tests.unit.transfer.rig import EPOCH, Rig, rigged, until

BLOCK = 8192


def doors_of(rig: Rig) -> BulkServer:
    assert isinstance(rig.receiver.doors, BulkServer)
    return rig.receiver.doors


def frame_of(rig: Rig, block: int, *, offset: int = 0, length: int = BLOCK, damage: int = 0) -> Frame:
    payload = bytes(rig.source.read(block)[offset : offset + length])
    return Frame("t1", block, offset, checksum(payload) ^ damage, payload)


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
    monkeypatch.setattr(bulk_server, "STRANGER_S", 0.05)
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


@contextlib.asynccontextmanager
async def offered(rig: Rig, carriers: BulkCarriers, on_ack: OnAck) -> AsyncIterator[Lane]:
    """A lane of t1 by a carrier of its own, its offer answered."""
    peer = carriers(rig.target(), 1)
    offer = Offer("t1", "r1", rig.layout, rig.blocks, rig.layout.block_bytes, EPOCH, 0)
    lane = peer.open(0, offer, on_ack)
    try:
        assert isinstance(await lane.receive(), Missing)
        yield lane
    finally:
        lane.close()
        await peer.close()


def closed_port() -> str:
    """Nobody listens there."""
    with socket.create_server(("127.0.0.1", 0)) as was:
        return f"127.0.0.1:{was.getsockname()[1]}"


async def test_a_closed_port_means_grpc_frames_a_counter_and_a_reason() -> None:
    reasons: list[str] = []
    carriers = BulkCarriers(reasons.append)
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0):
        doors_of(rig).advertised = closed_port()
        rig.watch.factory = carriers
        assert (await rig.push().done()).outcome is PushOutcome.COMMITTED
        assert rig.arrived
        assert (carriers.bulk_lanes, carriers.grpc_lanes, reasons) == (0, 1, ["unreachable"])


async def test_a_firewall_that_says_nothing_delays_one_lane_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_carrier, "CONNECT_S", 0.1)
    monkeypatch.setattr(bulk_carrier, "connect", lambda address: asyncio.Event().wait())
    reasons: list[str] = []
    async with rigged("bulk") as rig:
        rig.watch.factory = BulkCarriers(reasons.append)
        for number in range(3):
            async with rig.receiver.expect(f"t{number}", range(8), 0):
                assert (await rig.push(f"t{number}").done()).outcome is PushOutcome.COMMITTED
        assert reasons == ["unreachable"] * 3


async def test_several_lanes_wait_for_a_silent_firewall_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_carrier, "CONNECT_S", 0.1)
    tried: list[str] = []

    async def never(address: str) -> socket.socket:
        tried.append(address)
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(bulk_carrier, "connect", never)
    async with rigged("bulk", blocks=10, block_kib=1024, connections=4) as rig:
        rig.watch.factory = carriers = BulkCarriers()
        async with rig.receiver.expect("t1", range(10), 0):
            assert (await rig.push("t1").done()).outcome is PushOutcome.COMMITTED
        assert len(tried) == 1
        assert carriers.grpc_lanes == 3


async def test_a_connection_that_nobody_came_to_use_says_nothing_against_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bulk_server, "STRANGER_S", 0.05)
    monkeypatch.setattr(bulk_carrier, "AGAIN_AFTER_S", 0.0)
    failures = [OSError("not yet")]

    async def once_more(address: str) -> socket.socket:
        if failures:
            raise failures.pop()
        return await connect(address)

    monkeypatch.setattr(bulk_carrier, "connect", once_more)
    carriers = BulkCarriers()
    async with rigged("bulk") as rig:
        rig.watch.factory = carriers
        for number in range(3):  # refused; made beside the traffic, and closed unused; made again, and used
            async with rig.receiver.expect(f"t{number}", range(8), 0):
                assert (await rig.push(f"t{number}").done()).outcome is PushOutcome.COMMITTED
            if number == 1:
                await until(lambda: doors_of(rig).turned_away and not doors_of(rig).connections)
        assert (carriers.bulk_lanes, carriers.grpc_lanes) == (1, 2)


async def test_a_door_that_leads_to_something_else_is_left_alone_after_one_try() -> None:
    reasons: list[str] = []

    async def something_else(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 ready\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(something_else, "127.0.0.1", 0)
    async with rigged("bulk") as rig, rig.receiver.expect("t1", range(8), 0):
        doors_of(rig).advertised = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        rig.watch.factory = BulkCarriers(reasons.append)
        assert (await rig.push().done()).outcome is PushOutcome.COMMITTED
        assert rig.arrived
        assert "broken" in reasons
    server.close()
    await server.wait_closed()


async def test_a_receiver_without_doors_gets_grpc_frames() -> None:
    carriers = BulkCarriers()
    async with rigged("grpc") as rig, rig.receiver.expect("t1", range(8), 0):
        rig.watch.factory = carriers
        assert (await rig.push().done()).outcome is PushOutcome.COMMITTED
        assert (carriers.bulk_lanes, carriers.grpc_lanes) == (0, 1)


async def test_one_connection_serves_many_transfers() -> None:
    carriers = BulkCarriers()
    async with rigged("bulk", connections=1) as rig:
        rig.watch.factory = carriers
        for number in range(5):
            async with rig.receiver.expect(f"t{number}", range(8), 0):
                assert (await rig.push(f"t{number}").done()).outcome is PushOutcome.COMMITTED
            assert len(doors_of(rig).connections) == 1
        assert carriers.bulk_lanes == 5


async def test_a_cancelled_frame_is_ended_from_a_copy_and_the_connection_goes_on() -> None:
    """On a thin link a frame is cut in its middle; another transfer uses the same connection afterwards."""
    wan = WanSettings(rate="2MB", delay_ms=2)
    async with rigged("bulk", blocks=16, block_kib=512, connections=1, frame_bytes=512 * 1024, wan=wan) as rig:
        carriers = BulkCarriers()
        rig.watch.factory = carriers
        async with rig.receiver.expect("t1", range(16), 0) as incoming:
            push = rig.push("t1")
            await until(lambda: incoming.blocks_received >= 2)
            push.cancel()
            assert (await push.done()).outcome is PushOutcome.ENDED
        rig.source.bytes[:] = bytes(len(rig.source.bytes))  # as if the blocks had been given to another request
        async with rig.receiver.expect("t2", range(2), 0):
            assert (await rig.push("t2", rig.feed(ids=range(2))).done()).outcome is PushOutcome.COMMITTED
        assert len(doors_of(rig).connections) == 1
        assert doors_of(rig).turned_away == 0
        assert rig.receiver.stats.crc_errors == 0
        assert carriers.bulk_lanes == 2


async def test_acknowledgements_come_on_the_bulk_connection_and_the_end_on_the_stream() -> None:
    async with rigged("bulk") as rig:
        incoming = rig.receiver.expect("t1", range(8), 0)
        acks: list[int] = []
        async with offered(rig, BulkCarriers(), acks.append) as lane:
            await lane.send([frame_of(rig, 0)])
            await until(lambda: acks == [BLOCK])
            incoming.end()
            assert await lane.receive() == Ended(EndReason.RELEASED)


def on_the_wire(frame: Frame) -> bytes:
    """Of lane 1."""
    payload = bytes(frame.payload)
    return bulk_wire.frame_header(1, frame) + payload + bulk_wire.check(checksum(payload))


async def test_a_slow_receiver_holds_the_sender_back_and_loses_nothing() -> None:
    """The kernel's buffers fill; a send waits, and what it sends is whole when the receiver reads at last."""
    arrived = bytearray()
    reading = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reading.wait()
        while data := await reader.read(1 << 20):
            arrived.extend(data)
        writer.close()

    server = await asyncio.start_server(slow, "127.0.0.1", 0, limit=1024)
    sock = await connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    connection = BulkConnection(sock, lambda gone: None)
    payloads = [bytes([i]) * (1 << 20) for i in range(24)]
    counted: list[int] = []

    async def send() -> None:
        for payload in payloads:
            await connection.send(1, [Frame("t1", 0, 0, None, payload)], counted.append)

    sending = asyncio.ensure_future(send())
    await asyncio.sleep(0.2)
    assert not sending.done()
    reading.set()
    await sending
    connection.close()
    await until(lambda: len(arrived) == sum(counted))
    assert bytes(arrived) == b"".join(on_the_wire(Frame("t1", 0, 0, None, payload)) for payload in payloads)
    server.close()
    await server.wait_closed()


async def test_a_cancelled_turn_ends_its_frame_from_a_copy_and_drops_the_frames_behind_it() -> None:
    arrived = bytearray()
    reading = asyncio.Event()

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reading.wait()
        while data := await reader.read(1 << 20):
            arrived.extend(data)
        writer.close()

    server = await asyncio.start_server(slow, "127.0.0.1", 0, limit=1024)
    connection = BulkConnection(await connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), lambda gone: None)
    payloads = [bytearray([i]) * (1 << 20) for i in range(1, 25)]
    turn = [Frame("t1", 1, 0, None, memoryview(payload)) for payload in payloads]
    frames = [on_the_wire(frame) for frame in turn]
    counted: list[int] = []
    sending = asyncio.ensure_future(connection.send(1, turn, counted.append))
    await asyncio.sleep(0.2)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    for payload in payloads:  # given to another request
        payload[:] = bytes(len(payload))
    reading.set()
    behind = Frame("t1", 2, 0, None, b"behind")
    await connection.send(1, [behind], counted.append)
    connection.close()
    await until(lambda: len(arrived) == sum(counted))
    whole = len(arrived) // len(frames[0])
    assert 0 < whole < 24
    assert bytes(arrived) == b"".join(frames[:whole]) + on_the_wire(behind)
    server.close()
    await server.wait_closed()
