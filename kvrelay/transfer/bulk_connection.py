"""The sending end of one bulk connection: frames straight from the pool, acknowledgements back. Knows no transfer.

Own socket instead of a transport: a transport would keep views of the pool after their frame's lane is gone.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.transfer import bulk_wire
from kvrelay.transfer.bulk_shipment import Shipment
from kvrelay.transfer.bulk_wire import BadMessage
from kvrelay.transfer.carrier import Frame, OnAck

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
        self._queue: deque[Shipment] = deque()
        self._unshared = 0
        self._waiting = False
        """For the socket to take more."""
        self._acks = bytearray()
        self._loop.add_reader(sock, self._read)

    def attach(self, number: int, token: bytes, lane: Attached) -> None:
        """Frames of the lane may be sent from now on, and `lane` hears of them."""
        self.used = True
        self._lanes[number] = lane
        self._ship(Shipment(bulk_wire.attach(number, token)))

    def detach(self, number: int) -> None:
        """The lane is over. Idempotent."""
        if self._lanes.pop(number, None) is not None and not self.closed:
            self._ship(Shipment(bulk_wire.detach(number)))

    async def send(self, number: int, frames: Sequence[Frame], sent: Callable[[int], None]) -> None:
        """Frames of a lane. `sent` is told how many bytes of them have left or will, headers included.

        Returns when the kernel has all of it: payloads are not read after that, nor after a cancellation. Raises
        BulkLost.
        """
        if self.closed:
            raise BulkLost("the bulk connection is closed")
        shipment = Shipment(b"", number, frames)
        self._ship(shipment)
        waits = not shipment.whole
        try:
            if waits:
                if self.closed:
                    raise BulkLost("the bulk connection was lost")
                shipment.done = self._loop.create_future()
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
                if shipment.done is not None and not shipment.done.done():
                    shipment.done.set_exception(BulkLost("the bulk connection is closed"))
                    shipment.done.exception()  # whoever waits may be cancelled before it hears
            self._queue.clear()

    def _ship(self, shipment: Shipment) -> None:
        self._queue.append(shipment)
        if not self._waiting:
            self._write()

    def _orphan(self, shipment: Shipment) -> None:
        """Nobody waits for it any more. The frame that was begun is ended, from a copy: both ends stay in step."""
        if shipment in self._queue:
            if shipment.count:
                shipment.orphan()
            else:
                self._queue.remove(shipment)

    def _write(self) -> None:
        try:
            while self._queue:
                self._queue[0].write(self._sock)
                shipment = self._queue.popleft()
                if shipment.done is not None and not shipment.done.done():
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
