"""The carrier that prefers bulk connections: control on a Push stream, frames beside it, or on it if need be."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable

from kvrelay.transfer.bulk_connection import BulkConnection, BulkLost
from kvrelay.transfer.bulk_socket import connect
from kvrelay.transfer.carrier import Answer, BulkDoor, Frame, Lane, LaneLost, LaneRefused, Missing, Offer, OnAck, ignore
from kvrelay.transfer.grpc_carrier import GrpcCarrier
from kvrelay.types import KvTarget

log = logging.getLogger(__name__)

CONNECT_S = 1.0
"""How long a lane waits for a bulk connection; none waits again before one has been made."""
AGAIN_AFTER_S = 30.0
"""How long a door that led nowhere is left alone."""
MAX_ID_BYTES = 512
"""Of a transfer id in a bulk frame's header."""

Note = Callable[[str], None]
"""Is told, for each lane that could not have a bulk connection, why: "unreachable", "broken", "replaced"."""


class BulkCarriers:
    """Makes carriers; a CarrierFactory. `bulk_lanes`, `grpc_lanes`: lanes with frames to send, by where these went."""

    def __init__(self, note: Note = lambda reason: None) -> None:
        self.bulk_lanes = 0
        self.grpc_lanes = 0
        self.note = note

    def __call__(self, target: KvTarget, connections: int) -> "BulkCarrier":
        return BulkCarrier(self, target, connections)


class BulkCarrier:
    """`connections` channels for control, and as many bulk connections for frames, to one peer."""

    def __init__(self, makers: BulkCarriers, target: KvTarget, connections: int) -> None:
        self.peer = f"{target.instance_id} at {target.address}"
        self._makers = makers
        self._grpc = GrpcCarrier(target, connections)
        self._roads = _Roads(connections)
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, connection: int, offer: Offer, on_ack: OnAck = ignore) -> Lane:
        """Part of Carrier."""
        bulk = len(offer.transfer_id.encode()) <= MAX_ID_BYTES
        lane = self._grpc.open(connection, dataclasses.replace(offer, bulk=bulk), on_ack)
        return BulkLane(self, lane, connection, on_ack)

    async def close(self) -> None:
        """Part of Carrier."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._roads.close()
        await self._grpc.close()

    def start(self, task: "asyncio.Task[None]") -> None:
        """Keeps a lane's task, which ends with the lane or with the carrier."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def connection(self, number: int, door: BulkDoor | None) -> BulkConnection | None:
        """The bulk connection that leads to the door; None: there is none, and frames go on the stream. Counted."""
        made = None if door is None else await self._roads.connection(number, door.address, self)
        if made is None:
            self._makers.grpc_lanes += 1
            if door is not None:
                self._makers.note(self._roads.trouble or "replaced")
        else:
            self._makers.bulk_lanes += 1
        return made


class _Roads:
    """The bulk connections to one peer, each made when it is needed and kept; what hinders one hinders all."""

    def __init__(self, connections: int) -> None:
        self.trouble = ""
        """Why there is no connection; empty: nothing is known against it."""
        self._made: list[BulkConnection | None] = [None] * connections
        self._making: list[asyncio.Task[None] | None] = [None] * connections
        self._address = ""
        self._not_before = 0.0

    async def connection(self, number: int, address: str, carrier: BulkCarrier) -> BulkConnection | None:
        if address != self._address:  # another process, or the first
            self.close()
            self._address, self._not_before, self.trouble = address, 0.0, ""
        if self._made[number] is None and self._making[number] is None and time.monotonic() >= self._not_before:
            self._making[number] = task = asyncio.get_running_loop().create_task(self._make(number, carrier.peer))
            carrier.start(task)
        making = self._making[number]
        if self._made[number] is None and making is not None and not self.trouble:
            await asyncio.wait({making})
        return self._made[number] if address == self._address else None

    def close(self) -> None:
        for number, (making, made) in enumerate(zip(self._making, self._made, strict=True)):
            if making is not None:
                making.cancel()
            if made is not None:
                made.close()
            self._making[number] = self._made[number] = None

    async def _make(self, number: int, peer: str) -> None:
        address = self._address
        try:
            async with asyncio.timeout(CONNECT_S):
                sock = await connect(address)
        except (OSError, ValueError) as error:  # TimeoutError is an OSError
            log.warning("%s: no bulk connection to %s: %s; KV goes over gRPC", peer, address, error or "no answer")
            self._bad("unreachable")
        else:
            self._made[number] = BulkConnection(sock, self._lost)
            self.trouble = ""
        finally:
            if self._making[number] is asyncio.current_task():
                self._making[number] = None

    def _lost(self, connection: BulkConnection) -> None:
        if connection in self._made:
            self._made[self._made.index(connection)] = None
            if connection.used and not connection.proven:  # whatever listens there, it does not take frames
                self._bad("broken")

    def _bad(self, trouble: str) -> None:
        self.trouble = trouble
        self._not_before = time.monotonic() + AGAIN_AFTER_S


class BulkLane:
    """A Push stream whose frames go over a bulk connection if there is one; where they go is settled at the answer."""

    def __init__(self, carrier: BulkCarrier, lane: Lane, connection: int, on_ack: OnAck) -> None:
        self.acked = on_ack
        """Part of Attached."""
        self._carrier = carrier
        self._lane = lane
        self._connection = connection
        self._bulk: BulkConnection | None = None
        self._number = 0
        self._bulk_bytes = 0
        self._reader: asyncio.Task[None] | None = None
        self._news: asyncio.Queue[Answer | LaneLost | LaneRefused] = asyncio.Queue()
        self._closed = False

    @property
    def wire_bytes(self) -> int:
        """Part of Lane."""
        return self._lane.wire_bytes + self._bulk_bytes

    async def send(self, frames: Iterable[Frame]) -> None:
        """Part of Lane."""
        if self._bulk is None:
            return await self._lane.send(frames)
        try:
            await self._bulk.send(self._number, list(frames), self._sent)
        except BulkLost as error:
            raise LaneLost(f"{self._carrier.peer}: {error}") from error

    async def receive(self) -> Answer:
        """Part of Lane."""
        if self._reader is None:
            reply = await self._lane.receive()
            if isinstance(reply, Missing) and reply.bytes:
                await self._attach(reply.door)
            return reply
        news = await self._news.get()
        if isinstance(news, LaneLost | LaneRefused):
            raise news
        return news

    def close(self) -> None:
        """Part of Lane."""
        self._closed = True
        if self._reader is not None:
            self._reader.cancel()
        if self._bulk is not None:
            self._bulk.detach(self._number)
        self._lane.close()

    def lost(self, why: str) -> None:
        """Part of Attached."""
        self._news.put_nowait(LaneLost(f"{self._carrier.peer}: {why}"))

    def _sent(self, count: int) -> None:
        self._bulk_bytes += count

    async def _attach(self, door: BulkDoor | None) -> None:
        bulk = await self._carrier.connection(self._connection, door)
        if bulk is None or door is None or self._closed:
            return
        self._bulk, self._number = bulk, door.lane
        self._reader = asyncio.get_running_loop().create_task(self._read())
        self._carrier.start(self._reader)
        bulk.attach(door.lane, door.token, self)

    async def _read(self) -> None:
        """Passes on what the stream says, until it says no more."""
        try:
            while True:
                self._news.put_nowait(await self._lane.receive())
        except (LaneLost, LaneRefused) as end:
            self._news.put_nowait(end)
