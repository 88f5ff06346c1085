"""The sending end of bulk connections: when there is none, when it is slow, when a frame is cancelled."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from kvrelay.transfer import bulk_carrier, bulk_reader, bulk_wire
from kvrelay.transfer.bulk_carrier import BulkCarriers
from kvrelay.transfer.bulk_connection import BulkConnection
from kvrelay.transfer.bulk_socket import connect
from kvrelay.transfer.carrier import Ended, EndReason, Frame, Lane, Missing, Offer, OnAck
from kvrelay.transfer.frames import checksum
from kvrelay.transfer.push import PushOutcome
from kvrelay.wan.settings import WanSettings
from tests.contract.bulk import BLOCK, doors_of, frame_of
from tests.unit.transfer.rig import EPOCH, Rig, rigged, until


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
    monkeypatch.setattr(bulk_reader, "STRANGER_S", 0.05)
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


class SlowReceiver:
    """Takes a connection, and reads nothing until it is told to."""

    def __init__(self) -> None:
        self.arrived = bytearray()
        self.reading = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self.reading.wait()
        while data := await reader.read(1 << 20):
            self.arrived.extend(data)
        writer.close()


@contextlib.asynccontextmanager
async def slow_receiver() -> AsyncIterator[tuple[SlowReceiver, BulkConnection]]:
    """It, and a connection to it."""
    slow = SlowReceiver()
    server = await asyncio.start_server(slow.serve, "127.0.0.1", 0, limit=1024)
    connection = BulkConnection(await connect(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), lambda gone: None)
    try:
        yield slow, connection
    finally:
        slow.reading.set()
        connection.close()
        server.close()
        await server.wait_closed()


async def test_a_slow_receiver_holds_the_sender_back_and_loses_nothing() -> None:
    """The kernel's buffers fill; a send waits, and what it sends is whole when the receiver reads at last."""
    payloads = [bytes([i]) * (1 << 20) for i in range(24)]
    counted: list[int] = []
    async with slow_receiver() as (slow, connection):

        async def send() -> None:
            for payload in payloads:
                await connection.send(1, [Frame("t1", 0, 0, None, payload)], counted.append)

        sending = asyncio.ensure_future(send())
        await asyncio.sleep(0.2)
        assert not sending.done()
        slow.reading.set()
        await sending
        await until(lambda: len(slow.arrived) == sum(counted))
    assert bytes(slow.arrived) == b"".join(on_the_wire(Frame("t1", 0, 0, None, payload)) for payload in payloads)


async def test_a_cancelled_turn_ends_its_frame_from_a_copy_and_drops_the_frames_behind_it() -> None:
    payloads = [bytearray([i]) * (1 << 20) for i in range(1, 25)]
    turn = [Frame("t1", 1, 0, None, memoryview(payload)) for payload in payloads]
    frames = [on_the_wire(frame) for frame in turn]
    counted: list[int] = []
    async with slow_receiver() as (slow, connection):
        sending = asyncio.ensure_future(connection.send(1, turn, counted.append))
        await asyncio.sleep(0.2)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        for payload in payloads:  # given to another request
            payload[:] = bytes(len(payload))
        slow.reading.set()
        behind = Frame("t1", 2, 0, None, b"behind")
        await connection.send(1, [behind], counted.append)
        await until(lambda: len(slow.arrived) == sum(counted))
    whole = len(slow.arrived) // len(frames[0])
    assert 0 < whole < 24
    assert bytes(slow.arrived) == b"".join(frames[:whole]) + on_the_wire(behind)
