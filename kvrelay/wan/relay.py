"""A relayed TCP connection: two sockets, a flow each way, the round trip that connecting costs. Knows no shaping."""

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable
from typing import cast

from kvrelay.wan.direction import QUEUE_BYTES, Direction, Flow, Item, Mark

log = logging.getLogger(__name__)

READ_BYTES = 64 * 1024
CONNECT_S = 10.0
"""How long the target may take to accept, on its own side of the WAN."""


class End(asyncio.BufferedProtocol):
    """One socket. What it reads goes into `out`; what the other way's flow delivers, it writes."""

    def __init__(self, made: "Callable[[End], None]", lost: Callable[[], None]) -> None:
        self.out: Flow | None = None
        self.incoming: Flow | None = None
        """The flow that delivers here."""
        self.transport: asyncio.Transport | None = None
        self.lost = False
        self._made = made
        self._when_lost = lost
        self._early: list[bytes | Mark] = []
        """What came before `join`."""
        self._buffer = memoryview(bytearray(READ_BYTES))
        self._eof_read = False
        self._eof_written = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of BufferedProtocol."""
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._made(self)

    def join(self, out: Flow, incoming: Flow) -> None:
        """Both flows exist: bytes may pass."""
        self.out, self.incoming = out, incoming
        for item in self._early:
            out.put(item)
        self._early.clear()
        self.roomy()

    def roomy(self) -> int:
        """The flow has room again; returns how many bytes have been waiting for that."""
        if self.transport is None or is_gone(self.transport):
            return 0
        waiting = waiting_bytes(self.transport)
        self.transport.resume_reading()
        return waiting

    def get_buffer(self, sizehint: int) -> memoryview:
        """Part of BufferedProtocol."""
        room = self.out.room if self.out is not None else READ_BYTES
        return self._buffer[: max(1, min(room, READ_BYTES))]

    def buffer_updated(self, nbytes: int) -> None:
        """Part of BufferedProtocol."""
        self._put(bytes(self._buffer[:nbytes]))
        # Not earlier: uvloop starts to read after connection_made, paused or not.
        if self.transport is not None and (self.out is None or self.out.room < READ_BYTES):
            self.transport.pause_reading()

    def eof_received(self) -> bool:
        """Part of BufferedProtocol: the socket stays open for writing."""
        self._eof_read = True
        self._put(Mark.EOF)
        return not self._eof_written

    def pause_writing(self) -> None:
        """Part of BufferedProtocol: whoever reads here is slow."""
        if self.incoming is not None:
            self.incoming.block(True)

    def resume_writing(self) -> None:
        """Part of BufferedProtocol."""
        if self.incoming is not None:
            self.incoming.block(False)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of BufferedProtocol: the other side hears of it, after the bytes that were read before."""
        if self.incoming is not None:
            self.incoming.close()
        if exc is not None or not self._eof_read:
            self._put(Mark.RESET)
        self.lost = True
        self._when_lost()

    def deliver(self, item: Item) -> None:
        """What the other way's flow brings."""
        if self.transport is None or self.transport.is_closing():
            return
        if isinstance(item, memoryview):
            self.transport.write(item)
        elif item is Mark.RESET:
            self.reset()
        else:
            self._eof_written = True
            self.transport.write_eof()
            if self._eof_read:
                self.transport.close()

    def _put(self, item: bytes | Mark) -> None:
        if self.out is None:
            self._early.append(item)
        else:
            self.out.put(item)

    def reset(self) -> None:
        """Closes with RST, whatever is under way."""
        if self.transport is None:
            return
        if not is_gone(self.transport):
            linger_not(self.transport)
        self.transport.abort()


def is_gone(transport: asyncio.BaseTransport) -> bool:
    """Closing, or closed: uvloop may have closed a socket that broke, and not say that it is closing."""
    return transport.is_closing() or transport.get_extra_info("socket") is None


def waiting_bytes(transport: asyncio.BaseTransport) -> int:
    """That have come and are not read; and, if they fill the kernel's buffer, a queue of those that wait behind them.

    Linux offers a window of half a buffer's size.
    """
    sock = transport.get_extra_info("socket")
    unread = int.from_bytes(fcntl.ioctl(sock.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)
    full = 2 * unread >= sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    return max(unread, QUEUE_BYTES) if full else unread


def linger_not(transport: asyncio.BaseTransport) -> None:
    """The socket's close becomes a reset."""
    fileno = transport.get_extra_info("socket").fileno()
    with contextlib.closing(socket.socket(fileno=os.dup(fileno))) as twin:
        twin.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class Connection:
    """A caller's connection to a target across the WAN. `ended` is called once, when both sockets are gone."""

    def __init__(
        self,
        target: tuple[str, int],
        there: Direction,
        back: Direction,
        flowing: asyncio.Event,
        ended: "Callable[[Connection], None]",
    ) -> None:
        self._target = target
        self._there = there
        self._back = back
        self._flowing = flowing
        self._ended = ended
        self._opening: asyncio.Task[None] | None = None
        self.caller = End(self._accepted, self._look)
        self.callee = End(lambda end: None, self._look)

    def reset(self) -> None:
        """Both sides see RST."""
        if self._opening is not None:
            self._opening.cancel()
        self.caller.reset()
        self.callee.reset()

    async def closed(self) -> None:
        """After `reset`: waits for what was still opening."""
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)

    def _accepted(self, caller: End) -> None:
        self._opening = asyncio.get_running_loop().create_task(self._open())
        self._opening.add_done_callback(lambda task: self._look())

    async def _open(self) -> None:
        """SYN there, SYN-ACK back; then bytes. The target is dialled when the SYN has come to it."""
        began = time.monotonic()
        there, back = self._there.crossing_s(), self._back.crossing_s()
        try:
            await self._crossed(began + there)
            await self._dial()
            await self._crossed(began + there + back)
        except (OSError, TimeoutError) as error:
            log.info("%s:%d: %r", *self._target, error)
            await self._crossed(began + there + back)
            self.caller.reset()
            return
        forth = self._there.flow(self.callee.deliver, self.caller.roomy)
        reply = self._back.flow(self.caller.deliver, self.callee.roomy)
        self.caller.join(forth, reply)
        self.callee.join(reply, forth)

    async def _dial(self) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_S):
            await loop.create_connection(lambda: self.callee, *self._target)

    async def _crossed(self, due: float) -> None:
        """Waits until `due`, and for the end of a stall."""
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        await self._flowing.wait()

    def _look(self) -> None:
        """Both ends are gone, and nothing will bring one: the connection is over."""
        opening = self._opening is not None and not self._opening.done()
        if not opening and self.caller.lost and (self.callee.lost or self.callee.transport is None):
            self._ended(self)
