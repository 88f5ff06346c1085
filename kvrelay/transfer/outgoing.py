"""One push: its lanes, what it does when one breaks, and how it ends. Knows no carrier and no other push."""

import asyncio
import dataclasses
import logging
import time

from kvrelay.transfer.carrier import Committed, Ended, Frame, KvBytes, Lane, LaneLost, LaneRefused, Missing, Offer
from kvrelay.transfer.feed import BlockFeed
from kvrelay.transfer.frames import Span
from kvrelay.transfer.link import Entry, Link, Slot
from kvrelay.transfer.outbox import Outbox
from kvrelay.transfer.patience import Patience
from kvrelay.transfer.push import PushOutcome, PushProgress, PushResult
from kvrelay.transfer.stats import SenderStats

log = logging.getLogger(__name__)

LANE_BYTES = 4 * 1024 * 1024
"""A push opens one more lane for each of these that the receiver misses."""
NEAR_S = 0.004
"""A round trip shorter than this is not worth several connections; beside other work a frame's own is 2-3 ms."""
FAILURES_BESIDE_OTHERS = 2
"""A lane that breaks so often in a row leaves its work to the push's other lanes."""


class OutgoingTransfer:
    """One push under way; made by `KvSender.push`."""

    def __init__(
        self,
        link: Link,
        pool: KvBytes,
        feed: BlockFeed,
        offer: Offer,
        *,
        connections: int,
        resume_wait_s: float,
        stats: SenderStats,
    ) -> None:
        self._link = link
        self._pool = pool
        self._feed = feed
        self._offer = offer
        self._connections = connections
        self._resume_wait_s = resume_wait_s
        self._stats = stats
        self._outbox = Outbox(offer.block_bytes, link.window.next_frame_bytes)
        self._entry = Entry(self._outbox, feed)
        self._lanes: set[asyncio.Task[None]] = set()
        self._opened = 0
        self._wire_bytes = 0
        self._blocks_crossed: int | None = None
        self._moved = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._verdict: asyncio.Future[tuple[PushOutcome, str]] = loop.create_future()
        self._result: asyncio.Future[PushResult] = loop.create_future()

    async def done(self) -> PushResult:
        """Waits for the end and says what became of it; raises nothing. May be awaited any number of times.

        Once it has returned, the pool is not read any more.
        """
        return await asyncio.shield(self._result)

    def cancel(self) -> None:
        """Ends the push soon, as ENDED."""
        self._conclude(PushOutcome.ENDED, "cancelled by the sender")

    def progress(self) -> PushProgress | None:
        """How far the push is; None before the receiver has said what it misses."""
        asked = self._outbox.asked_bytes
        if asked is None:
            return None
        return PushProgress(asked - (0 if self._blocks_crossed is not None else self._outbox.remaining_bytes), asked)

    async def progressed(self, seen: PushProgress | None) -> PushProgress | None:
        """Waits until `progress()` differs from `seen` and returns it; None once the push has ended."""
        while not self._verdict.done():
            now = self.progress()
            if now != seen:
                return now
            self._moved.clear()
            await self._moved.wait()
        return None

    async def run(self) -> None:
        """The push's life, for its sender: returns when it has ended and `done` can tell. Raises nothing."""
        started = time.monotonic()
        unsubscribe = self._feed.subscribe(self._fed)
        self._link.join(self._entry)
        try:
            self._fed()
            self._open_lane()
            await self._verdict
        finally:
            unsubscribe()
            await self._close_lanes()
            self._link.leave(self._entry)
            self._result.set_result(self._tell(time.monotonic() - started))

    def _tell(self, seconds: float) -> PushResult:
        outcome, detail = self._verdict.result() if self._verdict.done() else (PushOutcome.ENDED, "the stage stops")
        asked = self._outbox.asked_bytes
        crossed = self._blocks_crossed
        if crossed is None:
            crossed = ((asked or 0) - self._outbox.remaining_bytes) // self._offer.block_bytes
        cached = 0 if asked is None else self._offer.blocks - self._outbox.blocks_asked
        return PushResult(outcome, detail, self._wire_bytes, crossed, cached, seconds)

    def _conclude(self, outcome: PushOutcome, detail: str = "") -> None:
        if not self._verdict.done():
            self._verdict.set_result((outcome, detail))
            self._moved.set()

    def _fed(self) -> None:
        if self._feed.error is not None:
            self._conclude(PushOutcome.FAILED, f"no more KV from here: {self._feed.error}")
        else:
            self._link.pump()

    def _open_lane(self) -> None:
        task = asyncio.get_running_loop().create_task(self._keep_lane(self._opened))
        self._opened += 1
        self._lanes.add(task)

    async def _close_lanes(self) -> None:
        for task in self._lanes:
            task.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)

    async def _keep_lane(self, number: int) -> None:
        """One lane, opened again when it breaks, until the push ends or the lane is given up."""
        patience = Patience(self._resume_wait_s)
        while not self._verdict.done():
            try:
                return await self._lane(number, patience)
            except LaneRefused as refusal:
                return self._conclude(PushOutcome.FAILED, str(refusal))
            except LaneLost as loss:
                wait = patience.broke(time.monotonic())
                if self._outbox.lanes_live and (wait is None or patience.failures >= FAILURES_BESIDE_OTHERS):
                    self._outbox.requeue(number)
                    self._link.pump()
                    return None
                if wait is None:
                    return self._conclude(PushOutcome.FAILED, f"given up: {loss}")
                log.info("push %s lane %d: %s; again in %.2f s", self._offer.transfer_id, number, loss, wait)
                await asyncio.sleep(wait)
                self._stats.resumes += 1
            except Exception:
                log.exception("push %s lane %d", self._offer.transfer_id, number)
                return self._conclude(PushOutcome.FAILED, "internal error")

    async def _lane(self, number: int, patience: Patience) -> None:
        connection = self._link.claim_connection()
        slot = Slot(self._link, self._entry, number, connection)

        def on_ack(payload_bytes: int) -> None:
            if slot.acked(payload_bytes):
                patience.moved()
                self._moved.set()

        lane = self._link.carrier.open(connection, dataclasses.replace(self._offer, lane=number), on_ack)
        try:
            answer = await lane.receive()
            patience.answered()
            if isinstance(answer, Missing):
                await self._serve(number, lane, slot, answer)
            elif not self._last(answer):
                raise LaneLost(f"an offer was answered by {answer}")
        finally:
            lane.close()
            self._link.yield_connection(connection)

    async def _serve(self, number: int, lane: Lane, slot: Slot, missing: Missing) -> None:
        self._outbox.asked(number, missing.ranges)
        self._moved.set()
        if number == 0 and self._opened == 1:
            for _ in range(1, self._lanes_for(missing.bytes)):
                self._open_lane()
        writer = asyncio.get_running_loop().create_task(self._write(slot, lane))
        try:
            while not self._last(await lane.receive()):
                pass
        finally:
            writer.cancel()
            slot.close()  # before the wait, which may be cut short
            await asyncio.gather(writer, return_exceptions=True)

    def _lanes_for(self, missing_bytes: int) -> int:
        """On a short path one connection is as fast as many, and costs less: its buffers stay in the cache."""
        round_trip = self._link.window.round_trip_s
        if round_trip is not None and round_trip < NEAR_S:
            return 1
        return min(self._connections, -(-missing_bytes // LANE_BYTES))

    async def _write(self, slot: Slot, lane: Lane) -> None:
        held, block = -1, memoryview(b"")

        def frame(span: Span) -> Frame:
            nonlocal held, block
            if span.block != held:  # read once: where the pool is not in host memory, reading copies
                held, block = span.block, self._pool.read(self._feed.block_ids[span.block])
            payload = block[span.offset : span.end]
            return Frame(self._offer.transfer_id, span.block, span.offset, None, payload)

        try:
            while True:
                await lane.send(map(frame, await slot.next()))
        except LaneLost:
            return  # the reader hears why
        except Exception:
            log.exception("push %s: cannot send", self._offer.transfer_id)
            self._conclude(PushOutcome.FAILED, "internal error")
        finally:
            self._wire_bytes += lane.wire_bytes

    def _last(self, reply: object) -> bool:
        match reply:
            case Committed(_, received):
                self._blocks_crossed = received
                self._conclude(PushOutcome.COMMITTED)
            case Ended(reason):
                self._conclude(PushOutcome.ENDED, reason.value)
            case _:
                return False
        return True
