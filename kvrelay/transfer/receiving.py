"""One lane at the receiver: frames in, replies out. Writes on the loop, so that the fence needs no waiting."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from kvrelay.errors import ProtocolViolation, StageFailed
from kvrelay.transfer.carrier import Ack, Committed, Ended, Frame, Missing, Offer, Reply
from kvrelay.transfer.frames import MAX_PAYLOAD_BYTES, checksum
from kvrelay.transfer.landing import Landing

if TYPE_CHECKING:
    from kvrelay.transfer.receiver import IncomingTransfer, KvReceiver

ACK_BYTES = 4 * 1024 * 1024
"""So many payload bytes are acknowledged at once ..."""
ACK_EVERY_S = 0.002
"""... and fewer if the last acknowledgement is so long ago, or once it is."""
REPLY_EVERY_S = 0.004
"""The same where it goes back as a reply: a gRPC message costs each end as much as a frame does."""


class BadFrame(StageFailed):
    """A frame that cannot be taken: damaged, or not of this transfer. Its lane fails; the block is asked for again."""


class ReceivingLane:
    """What a carrier drives: `take` or `land` for each frame, `replies` for what goes back, `close` at the end anyhow.

    `ack_elsewhere`: takes acknowledgements (payload bytes in all) instead of `replies`.
    """

    def __init__(self, receiver: "KvReceiver", offer: Offer) -> None:
        self.ack_elsewhere: Callable[[int], None] | None = None
        self._receiver = receiver
        self._offer = offer
        self._incoming: IncomingTransfer | None = None
        self._landing: Landing | None = None
        self._taken = 0
        self._acked = 0
        self._acked_at = 0.0
        self._error: Exception | None = None
        self._closed = False
        self._wake = asyncio.Event()
        self._ack_timer: asyncio.TimerHandle | None = None

    @property
    def writable(self) -> bool:
        """Frames of this lane may still go into the pool: asked at the moment of writing."""
        return not self._closed and self._error is None and self._incoming is not None and self._incoming.live

    def take(self, frame: Frame) -> None:
        """Checks the frame and copies it into the pool; refuses it if the transfer has ended.

        Raises BadFrame; the carrier passes that to `fail`.
        """
        incoming = self._of(frame)
        if not incoming.live:
            self._receiver.stats.frames_late += 1
            return
        self._check(frame, len(frame.payload), incoming)
        self._check_crc(frame, good=checksum(frame.payload) == frame.crc32c)
        self._store(frame, frame.payload, incoming)

    def land(self, frame: Frame, length: int, staging: memoryview) -> Landing:
        """The frame's payload of `length` bytes is about to come: where to. `staging`: 1 MiB to use until it is there.

        Raises BadFrame; the carrier passes that to `fail`, and the payload to nobody.
        """
        if not self.writable and self._incoming is not None:
            return Landing(self, frame, length, place=None, wanted=False, staging=staging)
        incoming = self._of(frame)
        self._check(frame, length, incoming)
        place = self._place(frame, length, incoming)
        self._landing = Landing(self, frame, length, place=place, wanted=True, staging=staging)
        return self._landing

    def landed(self, landing: Landing, payload: memoryview, *, good: bool) -> None:
        """For landings: the payload is whole, and as it was sent if it is `good`. Raises BadFrame."""
        frame, incoming, in_place = landing.frame, self._incoming, landing.in_place
        landing.abandon()
        self._landing = None
        if incoming is None or not self.writable:
            self.dropped()
            return
        self._check_crc(frame, good=good)
        if in_place:
            incoming.arrivals.add(frame.block, frame.offset, len(payload))
            self._count(len(payload), incoming)
        else:
            self._store(frame, payload, incoming)

    def dropped(self) -> None:
        """For landings: a payload has come that goes nowhere."""
        if self._incoming is not None and not self._incoming.live:
            self._receiver.stats.frames_late += 1

    def unclaim(self, landing: Landing) -> None:
        """For landings: the place in the pool is given up."""
        assert self._incoming is not None
        frame = landing.frame
        self._incoming.arrivals.unclaim(frame.block, frame.offset, landing.length)

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
        size = sum(map(len, missing)) * self._offer.block_bytes
        doors = self._receiver.doors if self._offer.bulk and size else None
        yield Missing(missing, size, None if doors is None else doors.open(self))
        told = 0
        while (verdict := admitted.verdict()) is None:
            await self._wake.wait()
            self._wake.clear()
            if self._error is not None:
                raise self._error
            if self._acked > told and not admitted.is_committed:
                told = self._acked
                if self.ack_elsewhere is None:
                    yield Ack(told)
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
        self._closed = True
        if self._landing is not None:
            self._landing.abandon()
        if self._ack_timer is not None:
            self._ack_timer.cancel()
        if self._incoming is not None:
            self._incoming.lanes.discard(self)
        if self._receiver.doors is not None:
            self._receiver.doors.shut(self)
        self._receiver.forget(self)

    def _join(self, incoming: "IncomingTransfer") -> None:
        if self._offer.blocks != incoming.arrivals.blocks:
            raise ProtocolViolation(f"offer.blocks: {self._offer.blocks}, but the leg has {incoming.arrivals.blocks}")
        self._incoming = incoming
        incoming.lanes.add(self)

    def _of(self, frame: Frame) -> "IncomingTransfer":
        if self._incoming is None or frame.transfer_id != self._offer.transfer_id:
            self._receiver.stats.frames_bad += 1
            raise BadFrame(f"frame of {frame.transfer_id!r} on a lane of {self._offer.transfer_id!r}")
        return self._incoming

    def _check(self, frame: Frame, length: int, incoming: "IncomingTransfer") -> None:
        stats = self._receiver.stats
        size = self._offer.block_bytes
        if frame.block >= incoming.arrivals.blocks:
            stats.frames_bad += 1
            raise BadFrame(f"frame.block: {frame.block}, but the leg has {incoming.arrivals.blocks} blocks")
        if not 0 < length <= MAX_PAYLOAD_BYTES or frame.offset + length > size:
            stats.frames_bad += 1
            raise BadFrame(f"frame.payload: {length} bytes at {frame.offset} do not fit a block of {size}")

    def _check_crc(self, frame: Frame, *, good: bool) -> None:
        if not good:
            self._receiver.stats.crc_errors += 1
            raise BadFrame(f"frame.crc32c: differs from the payload's, block {frame.block} at {frame.offset}")

    def _place(self, frame: Frame, length: int, incoming: "IncomingTransfer") -> memoryview | None:
        """The frame's bytes in the pool, claimed; None if it cannot be written there before its checksum is known."""
        view = self._receiver.pool.view(incoming.block_ids[frame.block])
        if view is None or not incoming.arrivals.claim(frame.block, frame.offset, length):
            return None
        return view[frame.offset : frame.offset + length]

    def _store(self, frame: Frame, payload: bytes | memoryview, incoming: "IncomingTransfer") -> None:
        arrivals = incoming.arrivals
        # What is being written in place is left to whoever writes it: if that fails, it is sent again with its lane.
        if arrivals.is_whole(frame.block) or arrivals.claimed(frame.block, frame.offset, len(payload)):
            self._receiver.stats.frames_repeated += 1
        else:
            self._receiver.pool.write(incoming.block_ids[frame.block], frame.offset, payload)
            arrivals.add(frame.block, frame.offset, len(payload))
        self._count(len(payload), incoming)

    def _count(self, length: int, incoming: "IncomingTransfer") -> None:
        self._receiver.stats.frames += 1
        self._receiver.stats.payload_bytes += length
        self._taken += length
        since = time.monotonic() - self._acked_at
        every = REPLY_EVERY_S if self.ack_elsewhere is None else ACK_EVERY_S
        if self._taken - self._acked >= ACK_BYTES or since >= every:
            self._acknowledge()
        elif self._ack_timer is None:
            self._ack_timer = asyncio.get_running_loop().call_later(every - since, self._acknowledge)
        incoming.settle()

    def _acknowledge(self) -> None:
        if self._ack_timer is not None:
            self._ack_timer.cancel()
            self._ack_timer = None
        self._acked, self._acked_at = self._taken, time.monotonic()
        if self.ack_elsewhere is not None:
            self.ack_elsewhere(self._acked)
        else:
            self.wake()
