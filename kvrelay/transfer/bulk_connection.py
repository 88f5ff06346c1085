"""The sending end of one bulk connection: frames straight from the pool, acknowledgements back. Knows no transfer.

Own socket instead of a transport: a transport would keep views of the pool after their frame's lane is gone.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Protocol

from kvrelay.rpc.address import bare_host, split_address
from kvrelay.transfer import bulk_wire
from kvrelay.transfer.bulk_server import keep_alive
from kvrelay.transfer.bulk_wire import BadMessage
from kvrelay.transfer.carrier import OnAck

_READ_BYTES = 16 * 1024
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

    async def send(self, buffers: Sequence[bytes | memoryview], sent: Callable[[int], None]) -> None:
        """Frames, each as its header and its payload. `sent` is told how many bytes of them have left or will.

        Returns when the kernel has all of it: `buffers` are not read after that, nor after a cancellation. Raises
        BulkLost.
        """
        if self.closed:
            raise BulkLost("the bulk connection is closed")
        shipment = self._ship(*buffers)
        waits = bool(shipment.buffers)
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

    def _ship(self, *buffers: bytes | memoryview) -> "_Shipment":
        shipment = _Shipment(self._loop.create_future(), deque(memoryview(buffer) for buffer in buffers))
        self._queue.append(shipment)
        if not self._waiting:
            self._write()
        return shipment

    def _orphan(self, shipment: "_Shipment") -> None:
        """Nobody waits for it any more. The frame that was begun is ended, from a copy: both ends stay in step."""
        if shipment in self._queue:
            if shipment.count:
                frame = islice(shipment.buffers, 2 - len(shipment.buffers) % 2)
                shipment.buffers = deque(memoryview(bytes(buffer)) for buffer in frame)
                shipment.count += sum(map(len, shipment.buffers))
            else:
                self._queue.remove(shipment)

    def _write(self) -> None:
        try:
            while self._queue:
                shipment = self._queue[0]
                shipment.sent(self._sock.sendmsg(shipment.buffers))
                if not shipment.buffers:
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
    """Frames with their headers, or a message by itself, as far as they are not sent."""

    __slots__ = ("buffers", "count", "done")

    def __init__(self, done: "asyncio.Future[None]", buffers: "deque[memoryview]") -> None:
        self.done = done
        self.buffers = buffers
        self.count = 0
        """Bytes that have left, and those that will though nobody waits for them."""

    def sent(self, count: int) -> None:
        self.count += count
        while self.buffers and count >= len(self.buffers[0]):
            count -= len(self.buffers.popleft())
        if count:
            self.buffers[0] = self.buffers[0][count:]


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
