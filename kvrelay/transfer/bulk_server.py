"""The receiving end of bulk connections: the doors of lanes, who may come in, and bytes to landings."""

import asyncio
import hmac
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from kvrelay.errors import StageFailed
from kvrelay.proto.v1 import kv_pb2
from kvrelay.rpc.address import bare_host, split_address
from kvrelay.transfer import bulk_wire
from kvrelay.transfer.bulk_wire import CHECK_BYTES, LENGTH_BYTES, MAX_MESSAGE_BYTES, BadMessage
from kvrelay.transfer.carrier import BulkDoor, Frame
from kvrelay.transfer.frames import MAX_PAYLOAD_BYTES
from kvrelay.transfer.landing import Landing
from kvrelay.transfer.receiving import BadFrame, ReceivingLane

log = logging.getLogger(__name__)

TOKEN_BYTES = 16
STRANGER_S = 5.0
"""How long a connection may be open before it has shown a token."""
MOST_LANES = 1024
"""Attached to one connection at once."""
REMEMBERED = 8192
"""Doors that were shut: whoever comes late is known, and its frames go nowhere."""


class BulkServer:
    """Doors for lanes. `address`: host:port as bound; `advertised`: as senders reach it."""

    def __init__(self) -> None:
        self.address = ""
        self.advertised = ""
        self.connections: set[BulkConnection] = set()
        self.turned_away = 0
        """Connections closed because of what came over them."""
        self._doors: dict[int, tuple[bytes, ReceivingLane]] = {}
        self._shut: OrderedDict[int, bytes] = OrderedDict()
        self._numbers: dict[ReceivingLane, int] = {}
        self._next = 1

    def open(self, lane: ReceivingLane) -> BulkDoor:
        """Part of Doors."""
        number, token = self._next, secrets.token_bytes(TOKEN_BYTES)
        self._next += 1
        self._doors[number] = (token, lane)
        self._numbers[lane] = number
        return BulkDoor(self.advertised, number, token)

    def shut(self, lane: ReceivingLane) -> None:
        """Part of Doors."""
        number = self._numbers.pop(lane, None)
        if number is not None and number in self._doors:
            self._remember(number, self._doors.pop(number)[0])

    def enter(self, number: int, token: bytes) -> ReceivingLane | None:
        """Whoever has the token comes in, once; None: the lane is over. BadMessage: the token is wrong."""
        expected, lane = self._doors.get(number) or (self._shut.get(number), None)
        if not hmac.compare_digest(expected or bytes(TOKEN_BYTES), token) or expected is None:
            raise BadMessage("a token that is not good")
        self._doors.pop(number, None)
        self._shut.pop(number, None)
        return lane

    def leftovers(self) -> dict[str, int]:
        """What is still held, by kind; all zero when idle."""
        return {"bulk_doors": len(self._numbers)}

    def _remember(self, number: int, token: bytes) -> None:
        self._shut[number] = token
        if len(self._shut) > REMEMBERED:
            self._shut.popitem(last=False)


@asynccontextmanager
async def bulk_server(listen: str) -> AsyncIterator[BulkServer]:
    """A server at `listen` until the body ends; `advertised` is the bound address at first. OSError: it cannot bind."""
    server = BulkServer()
    host, port = split_address(listen, "bulk_listen")
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: BulkConnection(server), bare_host(host), port)
    server.address = server.advertised = f"{host}:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for connection in list(server.connections):
            connection.abort()


class BulkConnection(asyncio.BufferedProtocol):
    """One connection: messages by turns with payloads, which the lanes say where to put."""

    def __init__(self, server: BulkServer) -> None:
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._lanes: dict[int, ReceivingLane | None] = {}
        """Attached; None: over already."""
        self._head = memoryview(bytearray(LENGTH_BYTES + MAX_MESSAGE_BYTES))
        self._headed = 0
        self._usual = len(self._head)
        """Bytes of the last frame's message: so much is read of the next, and its payload where it belongs."""
        self._landed: Landing | _Void | None = None
        """Whole, but its checksum is still to come."""
        self._staging = memoryview(bytearray())
        """For payloads that cannot be read into the pool; a stranger gets none."""
        self._landing: Landing | _Void | None = None
        self._sender: ReceivingLane | None = None
        """Whose frame is landing."""
        self._stranger: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of BufferedProtocol."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        keep_alive(transport.get_extra_info("socket"))
        self._server.connections.add(self)
        self._stranger = asyncio.get_running_loop().call_later(STRANGER_S, self._turn_away, "no token in time")

    def get_buffer(self, sizehint: int) -> memoryview:
        """Part of BufferedProtocol: called right before each read, which nothing comes between."""
        if self._landing is not None:
            return self._landing.buffer()
        usual = self._usual if self._landed is None else self._usual + CHECK_BYTES
        return self._head[self._headed : usual if self._headed < usual else None]

    def buffer_updated(self, nbytes: int) -> None:
        """Part of BufferedProtocol."""
        try:
            if self._landing is None:
                self._headed += nbytes
                self._read_head()
            else:
                self._landing.came(nbytes)
                self._leave_if_whole()
        except BadMessage as error:
            self._turn_away(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of BufferedProtocol."""
        self._server.connections.discard(self)
        if self._stranger is not None:
            self._stranger.cancel()
        self._abandon()
        for lane in self._lanes.values():
            if lane is not None:
                lane.ack_elsewhere = None
                lane.fail(StageFailed(f"push: the bulk connection was lost: {exc or 'closed by the sender'}"))
        self._lanes.clear()

    def abort(self) -> None:
        """Closes it at once."""
        if self._transport is not None:
            self._transport.abort()

    def _turn_away(self, why: str) -> None:
        peer = "nobody" if self._transport is None else self._transport.get_extra_info("peername")
        log.warning("bulk connection of %s closed: %s", peer, why)
        self._server.turned_away += 1
        self._abandon()
        self._landing = _Void(MAX_PAYLOAD_BYTES, self._head)  # what is still read before it closes goes nowhere
        self.abort()

    def _abandon(self) -> None:
        for landing in (self._landing, self._landed):
            if landing is not None:
                landing.abandon()

    @property
    def _in_payload(self) -> bool:
        return self._landing is not None

    def _read_head(self) -> None:
        """All messages in `_head`, and as much of payloads as is there with them."""
        at = 0
        while not self._in_payload and (start := at + LENGTH_BYTES) <= self._headed:
            end = start + bulk_wire.message_length(self._head, at)
            if self._headed < end:
                break
            self._obey(bulk_wire.read_message(self._head[start:end]))
            if self._landing is not None:
                self._usual = end - at
            at = end + self._land_early(end)
        if at < self._headed:
            self._head[: self._headed - at] = bytes(self._head[at : self._headed])
        self._headed -= at

    def _land_early(self, at: int) -> int:
        """The part of a payload that came with its message; how many bytes of it there were."""
        taken = 0
        while self._landing is not None and (here := self._headed - at - taken) > 0:
            room = self._landing.buffer()
            count = min(len(room), here)
            room[:count] = self._head[at + taken : at + taken + count]
            self._landing.came(count)
            taken += count
            self._leave_if_whole()
        return taken

    def _obey(self, message: kv_pb2.BulkMessage) -> None:
        kind = message.WhichOneof("message")
        if (kind == "check") != (self._landed is not None):
            raise BadMessage("a payload and its checksum belong together")
        match kind:
            case "check":
                self._finish(message.check)
            case "attach":
                self._attach(message.attach.lane, message.attach.token)
            case "frame":
                self._begin(message.frame)
            case "detach":
                self._lanes.pop(message.detach, None)
            case _:
                raise BadMessage("a message of no kind")

    def _attach(self, number: int, token: bytes) -> None:
        if len(self._lanes) >= MOST_LANES:
            raise BadMessage("too many lanes")
        lane = self._server.enter(number, token)
        self._lanes[number] = lane
        if lane is not None:
            lane.ack_elsewhere = lambda payload_bytes: self._ack(number, payload_bytes)
        if self._stranger is not None:
            self._stranger.cancel()
            self._stranger = None
            self._staging = memoryview(bytearray(MAX_PAYLOAD_BYTES))

    def _begin(self, message: kv_pb2.BulkFrame) -> None:
        if message.lane not in self._lanes:
            raise BadMessage("a frame of no lane of this connection")
        if message.payload_bytes > MAX_PAYLOAD_BYTES:
            raise BadMessage(f"a payload of {message.payload_bytes} bytes")
        lane, about, length = self._lanes[message.lane], message.frame, message.payload_bytes
        self._sender = lane
        try:
            frame = Frame(about.transfer_id, about.block, about.offset, None, b"")
            self._landing = _Void(length, self._staging) if lane is None else lane.land(frame, length, self._staging)
        except BadFrame as error:
            self._landing = _Void(length, self._staging)
            cast(ReceivingLane, lane).fail(error)
        self._leave_if_whole()

    def _leave_if_whole(self) -> None:
        if self._landing is not None and self._landing.whole:
            self._landed, self._landing = self._landing, None

    def _finish(self, crc32c: int) -> None:
        landing, self._landed = self._landed, None
        assert landing is not None
        try:
            landing.finish(crc32c)
        except BadFrame as error:
            assert self._sender is not None
            self._sender.fail(error)

    def _ack(self, number: int, payload_bytes: int) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(bulk_wire.ack(number, payload_bytes))


class _Void:
    """A landing for what no lane wants."""

    def __init__(self, length: int, scratch: memoryview) -> None:
        self._left = length
        self._scratch = scratch

    @property
    def whole(self) -> bool:
        return self._left == 0

    def buffer(self) -> memoryview:
        return self._scratch[: self._left]

    def came(self, count: int) -> None:
        self._left -= count

    def finish(self, crc32c: int) -> None:
        pass

    def abandon(self) -> None:
        pass


def keep_alive(sock: socket.socket) -> None:
    """A dead path is known within about ten seconds, also while nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
