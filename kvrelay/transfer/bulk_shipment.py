"""What one turn gives to a bulk connection's socket, piece by piece, with checksums. Knows no lane, no loop."""

import asyncio
import socket
from collections import deque
from collections.abc import Sequence

from kvrelay.transfer import bulk_wire
from kvrelay.transfer.bulk_wire import CHECK_BYTES
from kvrelay.transfer.carrier import Frame
from kvrelay.transfer.frames import checksum

PIECE_BYTES = 384 * 1024
"""Goes to the kernel at once, at most: when its checksum is taken after that, it is in the processor's cache."""
SMALL_BYTES = 32 * 1024
"""Payloads up to this are copied, headers and checksums between them, to go a piece at once: that costs less than a
system call for each."""

_NOTHING = memoryview(b"")


class Shipment:
    """A message, or frames, as far as they are not sent. A payload's checksum is taken piece by piece, once copied."""

    __slots__ = ("_at", "_crc", "_frames", "_given", "_head", "_payload", "_piece", "count", "done")

    def __init__(self, message: bytes, number: int = 0, frames: Sequence[Frame] = ()) -> None:
        self.done: asyncio.Future[None] | None = None
        """For whoever waits for it."""
        self.count = 0
        """Bytes that have left, and those that will though nobody waits for them."""
        # All headers at once: between two copies to the kernel each would have to come back from memory.
        self._frames = deque((bulk_wire.frame_header(number, frame), frame) for frame in frames)
        self._head = b""
        self._payload = _NOTHING
        self._piece = PIECE_BYTES
        self._at = self._crc = 0
        self._given: int | None = None
        self._advance(message)

    @property
    def whole(self) -> bool:
        """All of it has left."""
        return not self._head and self._at == len(self._payload)

    def write(self, sock: socket.socket) -> None:
        """Sends until it is whole. BlockingIOError: the kernel takes no more now. OSError: the socket is gone."""
        while self._head or self._at < len(self._payload):
            piece = self._payload[self._at : self._at + self._piece]
            count = sock.sendmsg((self._head, piece))
            self.count += count
            count -= len(self._head)
            if count < 0:
                self._head = self._head[count:]
                continue
            self._head = b""
            if count:
                self._crc = checksum(piece if count == len(piece) else piece[:count], self._crc)
                self._at += count
            if self._at == len(self._payload):
                crc32c = self._crc if self._given is None else self._given
                self._advance(bulk_wire.check(crc32c) if count else b"")

    def orphan(self) -> None:
        """What has begun is ended, from a copy; the frames behind it are dropped."""
        self._frames.clear()
        rest = bytes(self._payload[self._at :])
        self.count += len(self._head) + (len(rest) + CHECK_BYTES if rest else 0)
        self._payload, self._at = memoryview(rest), 0

    def _advance(self, before: bytes) -> None:
        """`before` goes next, and a frame behind it, or as many small ones as make a piece."""
        parts: list[bytes | memoryview] = [before]
        size = 0
        self._payload, self._at, self._crc = _NOTHING, 0, 0
        while self._frames and size < PIECE_BYTES:
            header, frame = self._frames.popleft()
            payload, given = frame.payload, frame.crc32c
            parts.append(header)
            if len(payload) > SMALL_BYTES:
                self._payload, self._given = memoryview(payload), given
                self._piece = -(-len(payload) // -(-len(payload) // PIECE_BYTES))
                break
            size += len(payload)
            parts += payload, bulk_wire.check(checksum(payload) if given is None else given)
        self._head = b"".join(parts)
