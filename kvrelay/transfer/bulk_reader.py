"""The receiving end of one bulk connection: bytes to landings, acknowledgements back. Knows no pool, no transfer.

Own socket instead of a transport: what stands behind a payload comes with it in one system call, and the kernel need
not wake the loop for a few of its bytes.
"""

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, cast

from kvrelay.errors import StageFailed
from kvrelay.proto.v1 import kv_pb2
from kvrelay.transfer import bulk_wire
from kvrelay.transfer.bulk_socket import keep_alive
from kvrelay.transfer.bulk_wire import CHECK_BYTES, LENGTH_BYTES, MAX_MESSAGE_BYTES, BadMessage
from kvrelay.transfer.carrier import Frame
from kvrelay.transfer.frames import MAX_PAYLOAD_BYTES
from kvrelay.transfer.landing import READ_BYTES, Landing
from kvrelay.transfer.receiving import BadFrame, ReceivingLane

if TYPE_CHECKING:
    from kvrelay.transfer.bulk_server import BulkServer

log = logging.getLogger(__name__)

STRANGER_S = 5.0
"""How long a connection may be open before it has shown a token."""
MOST_LANES = 1024
"""Attached to one connection at once."""
MOST_READS = 16
"""In a row; then the loop has its turn."""
SMALL_BYTES = 32 * 1024
"""Payloads up to this are read many at once, and copied: that costs less than a system call for each."""
MANY_BYTES = 128 * 1024


class BulkReader:
    """Messages by turns with payloads, which the lanes say where to put. Reads until it is closed, by either end."""

    def __init__(self, server: "BulkServer", sock: socket.socket, peer: object) -> None:
        self._server = server
        self._sock = sock
        self._peer = peer
        self._closed = False
        self._loop = asyncio.get_running_loop()
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
        self._acks = bytearray()
        self._waiting = False
        """For the socket to take more of them."""
        self._low_water = 1
        keep_alive(sock)
        server.connections.add(self)
        self._stranger: asyncio.TimerHandle | None = self._loop.call_later(
            STRANGER_S, self._turn_away, "no token in time"
        )
        self._loop.add_reader(sock, self._read)

    def close(self, why: str = "the receiver stops") -> None:
        """At once; its lanes fail. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._server.connections.discard(self)
        if self._stranger is not None:
            self._stranger.cancel()
        self._loop.remove_reader(self._sock)
        if self._waiting:
            self._loop.remove_writer(self._sock)
        self._sock.close()
        for landing in (self._landing, self._landed):
            if landing is not None:
                landing.abandon()
        for lane in self._lanes.values():
            if lane is not None:
                lane.ack_elsewhere = None
                lane.fail(StageFailed(f"push: the bulk connection was lost: {why}"))
        self._lanes.clear()

    def _turn_away(self, why: str) -> None:
        log.warning("bulk connection of %s closed: %s", self._peer, why)
        self._server.turned_away += 1
        self.close(why)

    def _read(self) -> None:
        """All that has come, within limits."""
        try:
            for _ in range(MOST_READS):
                if not self._read_once():
                    break
        except BlockingIOError:
            pass
        except BadMessage as error:
            return self._turn_away(str(error))
        except OSError as error:
            return self.close(str(error))
        self._wake_for_much()

    def _read_once(self) -> bool:
        """Whether more may be there. BadMessage, OSError: the connection is of no more use."""
        landing = self._landing
        if landing is None:
            usual = self._usual if self._landed is None else self._usual + CHECK_BYTES
            room = self._head[self._headed : usual if self._headed < usual else None]
            asked = len(room)
            count = headed = self._sock.recv_into(room)
        else:
            room = landing.buffer()
            asked = len(room)
            if asked < landing.left:
                count, headed = self._sock.recv_into(room), 0
            else:
                behind = self._head[: self._usual + CHECK_BYTES]
                asked += len(behind)
                count = self._sock.recvmsg_into((room, behind))[0]
                headed = max(count - len(room), 0)
            landing.came(count - headed)
            self._leave_if_whole()
        if not count:
            raise ConnectionResetError("closed by the sender")
        if headed:
            self._headed += headed
            self._read_head()
        return count == asked

    def _wake_for_much(self) -> None:
        """Of a large payload's rest the kernel is to tell when there is much of it, or all."""
        left = 0 if self._landing is None else self._landing.left
        low_water = min(left, READ_BYTES) if left > SMALL_BYTES else 1
        if low_water != self._low_water:
            self._low_water = low_water
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)

    def _read_head(self) -> None:
        """All messages in `_head`, and as much of payloads as is there with them."""
        head, at = self._head, 0
        while self._landing is None and (start := at + LENGTH_BYTES) <= self._headed:
            end = start + bulk_wire.message_length(head, at)
            if self._headed < end:
                break
            if self._landed is not None:
                self._finish(bulk_wire.read_check(head[at:end]))
                at = end
            else:
                self._obey(bulk_wire.read_message(head[start:end]), end - at)
                at = end + self._land_early(end)
        rest = bytes(head[at : self._headed])
        if self._stranger is None and len(head) < MANY_BYTES:
            self._head = memoryview(bytearray(MANY_BYTES))
        self._head[: len(rest)] = rest
        self._headed = len(rest)

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

    def _obey(self, message: kv_pb2.BulkMessage, length: int) -> None:
        match message.WhichOneof("message"):
            case "attach":
                self._attach(message.attach.lane, message.attach.token)
            case "frame":
                self._begin(message.frame, length)
            case "detach":
                self._lanes.pop(message.detach, None)
            case _:
                raise BadMessage("a message of no kind, or a checksum of nothing")

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

    def _begin(self, message: kv_pb2.BulkFrame, message_bytes: int) -> None:
        if message.lane not in self._lanes:
            raise BadMessage("a frame of no lane of this connection")
        if message.payload_bytes > MAX_PAYLOAD_BYTES:
            raise BadMessage(f"a payload of {message.payload_bytes} bytes")
        lane, about, length = self._lanes[message.lane], message.frame, message.payload_bytes
        self._sender = lane
        self._usual = message_bytes if length > SMALL_BYTES else MANY_BYTES
        try:
            frame = Frame(about.transfer_id, about.block, about.offset, None, b"")
            self._landing = _Void(length, self._staging) if lane is None else lane.land(frame, length, self._staging)
        except BadFrame as error:
            self._landing = _Void(length, self._staging)
            cast(ReceivingLane, lane).fail(error)
        self._leave_if_whole()

    def _leave_if_whole(self) -> None:
        if self._landing is not None and not self._landing.left:
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
        self._acks += bulk_wire.ack(number, payload_bytes)
        if not self._waiting:
            self._write()

    def _write(self) -> None:
        try:
            del self._acks[: self._sock.send(self._acks)]
        except BlockingIOError:
            pass
        except OSError:
            self._acks.clear()  # reading says why
        if bool(self._acks) != self._waiting:
            self._waiting = not self._waiting
            if self._waiting:
                self._loop.add_writer(self._sock, self._write)
            else:
                self._loop.remove_writer(self._sock)


class _Void:
    """A landing for what no lane wants."""

    def __init__(self, length: int, scratch: memoryview) -> None:
        self.left = length
        self._scratch = scratch

    def buffer(self) -> memoryview:
        return self._scratch[: self.left]

    def came(self, count: int) -> None:
        self.left -= count

    def finish(self, crc32c: int) -> None:
        pass

    def abandon(self) -> None:
        pass
