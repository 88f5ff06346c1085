"""The sending end of one bulk connection: frames straight from the pool, acknowledgements back. Knows no transfer.

Own socket instead of a transport: a transport would keep views of the pool after their frame's lane is gone.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.rpc.address import bare_host, split_address
from kvrelay.transfer import bulk_wire
from kvrelay.transfer.bulk_server import keep_alive
from kvrelay.transfer.bulk_wire import CHECK_BYTES, BadMessage
from kvrelay.transfer.carrier import Frame, OnAck
from kvrelay.transfer.frames import checksum

_READ_BYTES = 16 * 1024
PIECE_BYTES = 256 * 1024
"""Goes to the kernel at once, at most: when its checksum is taken after that, it is in the processor's cache."""
SHARE_BYTES = 2 * 1024 * 1024
"""After so many without a wait the loop has its turn: acknowledgements, other lanes, other work of the program."""


class BulkLost(Exception):
    """The connection is gone. The text says why."""


class Attached(Protocol):
    """A lane, as its bulk connection sees it."""

    @property
    def acked(self) -> OnAck:
        """Is told of the lane's acknowledgements."""
        ...

    def lost(self, why: str) -> None:
        """The connection is gone."""
        ...


class BulkConnection:
    """A connected socket. `gone` is called once, when the connection ends by itself."""

    def __init__(self, sock: socket.socket, gone: "Callable[[BulkConnection], None]") -> None:
        self.closed = False
        self.used = False
        """A lane has been attached to it, or something has come that this protocol does not have."""
        self.proven = False
        """Something has been acknowledged on it."""
        self._sock = sock
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._lanes: dict[int, Attached] = {}
        self._queue: deque[_Shipment] = deque()
        self._unshared = 0
        self._waiting = False
        """For the socket to take more."""
        self._acks = bytearray()
        self._loop.add_reader(sock, self._read)

    def attach(self, number: int, token: bytes, lane: Attached) -> None:
        """Frames of the lane may be sent from now on, and `lane` hears of them."""
        self.used = True
        self._lanes[number] = lane
        self._ship(bulk_wire.attach(number, token))

    def detach(self, number: int) -> None:
        """The lane is over. Idempotent."""
        if self._lanes.pop(number, None) is not None and not self.closed:
            self._ship(bulk_wire.detach(number))

    async def send(self, number: int, frames: Sequence[Frame], sent: Callable[[int], None]) -> None:
        """Frames of a lane. `sent` is told how many bytes of them have left or will, headers included.

        Returns when the kernel has all of it: payloads are not read after that, nor after a cancellation. Raises
        BulkLost.
        """
        if self.closed:
            raise BulkLost("the bulk connection is closed")
        shipment = self._ship(b"", number, frames)
        waits = not shipment.whole
        try:
            if waits:
                await shipment.done
        except asyncio.CancelledError:
            self._orphan(shipment)
            raise
        finally:
            sent(shipment.count)
        self._unshared = 0 if waits else self._unshared + shipment.count
        if self._unshared >= SHARE_BYTES:
            self._unshared = 0
            await asyncio.sleep(0)

    def close(self) -> None:
        """Closes the socket. Idempotent; `gone` is not called."""
        if not self.closed:
            self.closed = True
            self._loop.remove_reader(self._sock)
            if self._waiting:
                self._loop.remove_writer(self._sock)
            self._sock.close()
            for shipment in self._queue:
                if not shipment.done.done():
                    shipment.done.set_exception(BulkLost("the bulk connection is closed"))
                    shipment.done.exception()  # it may have no reader
            self._queue.clear()

    def _ship(self, message: bytes, number: int = 0, frames: Sequence[Frame] = ()) -> "_Shipment":
        shipment = _Shipment(self._loop.create_future(), message, number, frames)
        self._queue.append(shipment)
        if not self._waiting:
            self._write()
        return shipment

    def _orphan(self, shipment: "_Shipment") -> None:
        """Nobody waits for it any more. The frame that was begun is ended, from a copy: both ends stay in step."""
        if shipment in self._queue:
            if shipment.count:
                shipment.orphan()
            else:
                self._queue.remove(shipment)

    def _write(self) -> None:
        try:
            while self._queue:
                shipment = self._queue[0]
                shipment.sent(self._sock.sendmsg(shipment.buffers()))
                if shipment.whole:
                    self._queue.popleft()
                    if not shipment.done.done():
                        shipment.done.set_result(None)
        except BlockingIOError:
            self._wait(True)
        except OSError as error:
            self._lose(f"the bulk connection was lost: {error}")
        else:
            self._wait(False)

    def _wait(self, waiting: bool) -> None:
        if waiting and not self._waiting:
            self._loop.add_writer(self._sock, self._write)
        elif self._waiting and not waiting:
            self._loop.remove_writer(self._sock)
        self._waiting = waiting

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                self._lose("the bulk connection was closed by the receiver")
                return
            self._acks += data
            for ack in bulk_wire.read_acks(self._acks):
                self.proven = True
                lane = self._lanes.get(ack.lane)
                if lane is not None:
                    lane.acked(ack.payload_bytes)
        except BlockingIOError:
            return
        except (OSError, BadMessage) as error:
            self.used |= isinstance(error, BadMessage)
            self._lose(f"the bulk connection was lost: {error}")

    def _lose(self, why: str) -> None:
        if self.closed:
            return
        self.close()
        lanes, self._lanes = list(self._lanes.values()), {}
        self._gone(self)
        for lane in lanes:
            lane.lost(why)


class _Shipment:
    """A message, or frames, as far as they are not sent. A payload's checksum is taken piece by piece, once copied."""

    __slots__ = ("_at", "_crc", "_frame", "_frames", "_head", "_number", "_payload", "count", "done")

    def __init__(self, done: "asyncio.Future[None]", message: bytes, number: int, frames: Sequence[Frame]) -> None:
        self.done = done
        self.count = 0
        """Bytes that have left, and those that will though nobody waits for them."""
        self._number = number
        self._frames = iter(frames)
        self._frame: Frame | None = None
        """The one under way."""
        self._head = b""
        self._payload = memoryview(b"")
        self._at = self._crc = 0
        self._begin_next(message)

    @property
    def whole(self) -> bool:
        """All of it has left."""
        return self._frame is None and not self._head

    def buffers(self) -> tuple[bytes, memoryview]:
        """What goes next."""
        return self._head, self._payload[self._at : self._at + PIECE_BYTES]

    def sent(self, count: int) -> None:
        """So much of `buffers` has left."""
        self.count += count
        payload_bytes = count - len(self._head)
        self._head = self._head[count:]
        if payload_bytes > 0:
            end = self._at + payload_bytes
            self._crc = checksum(self._payload[self._at : end], self._crc)
            self._at = end
        if self._frame is not None and not self._head and self._at == len(self._payload):
            given = self._frame.crc32c
            self._begin_next(bulk_wire.check(self._crc if given is None else given))

    def orphan(self) -> None:
        """What has begun is ended, from a copy; the frames behind it are dropped."""
        self._frames = iter(())
        self._payload, self._at = memoryview(bytes(self._payload[self._at :])), 0
        self.count += len(self._head) + len(self._payload) + (0 if self._frame is None else CHECK_BYTES)

    def _begin_next(self, before: bytes) -> None:
        self._frame = frame = next(self._frames, None)
        self._head = before if frame is None else before + bulk_wire.frame_header(self._number, frame)
        self._payload = memoryview(b"" if frame is None else frame.payload)
        self._at = self._crc = 0


async def connect(address: str) -> socket.socket:
    """A connected socket that does not block. OSError, ValueError: it cannot be had."""
    host, port = split_address(address, "bulk door")
    loop = asyncio.get_running_loop()
    last: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, where in await _resolved(bare_host(host), port):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            keep_alive(sock)
            await loop.sock_connect(sock, where)
            return sock
        except OSError as error:
            last = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise last


async def _resolved(host: str, port: int) -> Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple]]:  # type: ignore[type-arg]
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
