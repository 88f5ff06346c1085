"""One lane at the receiver: frames in, replies out. Writes on the loop, so that the fence needs no waiting."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from kvrelay.errors import ProtocolViolation, StageFailed
from kvrelay.transfer.carrier import Ack, Committed, Ended, Frame, Missing, Offer, Reply
from kvrelay.transfer.frames import MAX_PAYLOAD_BYTES, checksum

if TYPE_CHECKING:
    from kvrelay.transfer.receiver import IncomingTransfer, KvReceiver

ACK_BYTES = 64 * 1024
"""So many payload bytes are acknowledged at once ..."""
ACK_DELAY_S = 0.003
"""... and fewer after this time."""


class BadFrame(StageFailed):
    """A frame that cannot be taken: damaged, or not of this transfer. Its lane fails; the block is asked for again."""


class ReceivingLane:
    """What a carrier drives: `take` for each frame, `replies` for what goes back, `close` at the end in any case."""

    def __init__(self, receiver: "KvReceiver", offer: Offer) -> None:
        self._receiver = receiver
        self._offer = offer
        self._incoming: IncomingTransfer | None = None
        self._taken = 0
        self._acked = 0
        self._error: Exception | None = None
        self._wake = asyncio.Event()
        self._ack_timer: asyncio.TimerHandle | None = None

    def take(self, frame: Frame) -> None:
        """Checks the frame and copies it into the pool; refuses it if the transfer has ended.

        Raises BadFrame; the carrier passes that to `fail`.
        """
        stats = self._receiver.stats
        incoming = self._incoming
        if incoming is None or frame.transfer_id != self._offer.transfer_id:
            stats.frames_bad += 1
            raise BadFrame(f"frame of {frame.transfer_id!r} on a lane of {self._offer.transfer_id!r}")
        if not incoming.live:
            stats.frames_late += 1
            return
        self._check(frame, incoming)
        if incoming.arrivals.is_whole(frame.block):
            stats.frames_repeated += 1
        else:
            self._receiver.pool.write(incoming.block_ids[frame.block], frame.offset, frame.payload)
            incoming.arrivals.add(frame.block, frame.offset, len(frame.payload))
        stats.frames += 1
        stats.payload_bytes += len(frame.payload)
        self._taken += len(frame.payload)
        self._plan_ack()
        incoming.settle()

    async def replies(self) -> AsyncIterator[Reply]:
        """Missing, Acks, and Committed or Ended as the last; or Ended alone. Raises what `fail` was given.

        Raises ProtocolViolation if the sender counts other blocks than the leg.
        """
        admitted = await self._receiver.admit(self._offer)
        if isinstance(admitted, Ended):
            yield admitted
            return
        if isinstance(admitted, Committed):
            yield Missing((), 0)
            yield admitted
            return
        self._join(admitted)
        missing = admitted.arrivals.missing()
        yield Missing(missing, sum(map(len, missing)) * self._offer.block_bytes)
        while (verdict := admitted.verdict()) is None:
            await self._wake.wait()
            self._wake.clear()
            if self._error is not None:
                raise self._error
            if self._acked < self._taken and not admitted.is_committed:
                self._acked = self._taken
                yield Ack(self._acked)
        yield verdict

    def fail(self, error: Exception) -> None:
        """The lane cannot go on: `replies` raises `error`."""
        self._error = error
        self.wake()

    def wake(self) -> None:
        """Lets `replies` look again."""
        self._wake.set()

    def close(self) -> None:
        """The carrier is done with the lane. Idempotent."""
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        if self._incoming is not None:
            self._incoming.lanes.discard(self)
        self._receiver.forget(self)

    def _join(self, incoming: "IncomingTransfer") -> None:
        if self._offer.blocks != incoming.arrivals.blocks:
            raise ProtocolViolation(f"offer.blocks: {self._offer.blocks}, but the leg has {incoming.arrivals.blocks}")
        self._incoming = incoming
        incoming.lanes.add(self)

    def _check(self, frame: Frame, incoming: "IncomingTransfer") -> None:
        stats = self._receiver.stats
        size, length = self._offer.block_bytes, len(frame.payload)
        if frame.block >= incoming.arrivals.blocks:
            stats.frames_bad += 1
            raise BadFrame(f"frame.block: {frame.block}, but the leg has {incoming.arrivals.blocks} blocks")
        if not 0 < length <= MAX_PAYLOAD_BYTES or frame.offset + length > size:
            stats.frames_bad += 1
            raise BadFrame(f"frame.payload: {length} bytes at {frame.offset} do not fit a block of {size}")
        if checksum(frame.payload) != frame.crc32c:
            stats.crc_errors += 1
            raise BadFrame(f"frame.crc32c: differs from the payload's, block {frame.block} at {frame.offset}")

    def _plan_ack(self) -> None:
        if self._taken - self._acked >= ACK_BYTES:
            self.wake()
        elif self._ack_timer is None or self._ack_timer.when() <= asyncio.get_running_loop().time():
            self._ack_timer = asyncio.get_running_loop().call_later(ACK_DELAY_S, self.wake)
