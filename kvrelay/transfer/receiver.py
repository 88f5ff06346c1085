"""The receiving end: transfers that legs expect, offers that wait for them, the fence. Knows no carrier, no engine."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol, Self

from kvrelay.errors import LayoutMismatch, ProtocolViolation
from kvrelay.transfer.arrivals import Arrivals
from kvrelay.transfer.carrier import BulkDoor, Committed, Ended, EndReason, KvBytes, Offer
from kvrelay.transfer.receiving import ReceivingLane
from kvrelay.transfer.stats import ReceiverStats
from kvrelay.types import LayoutFingerprint

REMEMBERED = 8192
"""Ended transfers that are refused at once instead of being parked."""


class IncomingTransfer:
    """One leg's KV on its way in. `async with`, or `end()` in a `finally`."""

    def __init__(self, receiver: "KvReceiver", transfer_id: str, block_ids: Sequence[int], have: int) -> None:
        self.transfer_id = transfer_id
        self.block_ids = tuple(block_ids)
        self.arrivals = Arrivals(len(block_ids), have, receiver.layout.block_bytes)
        self.live = True
        """Frames may be written."""
        self.lanes: set[ReceivingLane] = set()
        self._receiver = receiver
        self._committed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.settle()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.end()

    async def committed(self) -> int:
        """Returns, once every block is here, how many came. Never returns if `end` comes first: cancel the waiter."""
        return await asyncio.shield(self._committed)

    @property
    def is_committed(self) -> bool:
        """Every block is here."""
        return self._committed.done()

    @property
    def leading_blocks(self) -> int:
        """Blocks complete now without a gap from block 0 on, those that were here from the start included."""
        return self.arrivals.leading

    @property
    def blocks_received(self) -> int:
        """Complete blocks that came by now."""
        return self.arrivals.received

    def end(self) -> None:
        """The fence: no byte is written after it returns, and whoever still sends is told. Idempotent."""
        self._receiver.end(self.transfer_id)

    def settle(self) -> None:
        """Commits if every block is here, and lets the lanes tell it. For the lanes of this transfer."""
        if self.arrivals.complete and not self._committed.done():
            self._committed.set_result(self.arrivals.received)
            self._receiver.count_commit(self.arrivals)
            self.wake()

    def wake(self) -> None:
        """Lets every lane look at the transfer again."""
        for lane in self.lanes:
            lane.wake()

    def verdict(self) -> Committed | Ended | None:
        """What the sender is to be told last; None while blocks are still to come."""
        if self.is_committed:
            return Committed(self.arrivals.blocks, self.arrivals.received)
        return None if self.live else Ended(EndReason.RELEASED)


class Doors(Protocol):
    """Another way in for frames."""

    def open(self, lane: ReceivingLane) -> BulkDoor:
        """Lets the lane's frames in, until `shut`."""
        ...

    def shut(self, lane: ReceivingLane) -> None:
        """No more of them. Idempotent, also for a lane that has no door."""
        ...


class KvReceiver:
    """All transfers into one stage's pool.

    `epoch`: of this process. `offer_wait_s`: how long an Offer that no leg has announced or expects is parked.
    `doors`: another way in for frames, offered to senders that can use it.
    """

    def __init__(
        self,
        pool: KvBytes,
        layout: LayoutFingerprint,
        *,
        epoch: int,
        offer_wait_s: float = 10.0,
        doors: Doors | None = None,
    ) -> None:
        self.pool = pool
        self.layout = layout
        self.epoch = epoch
        self.doors = doors
        self.stats = ReceiverStats()
        self._offer_wait_s = offer_wait_s
        self._announced: set[str] = set()
        self._incoming: dict[str, IncomingTransfer] = {}
        self._parked: dict[str, set[asyncio.Future[IncomingTransfer | Committed | Ended]]] = {}
        self._ended: OrderedDict[str, Committed | Ended] = OrderedDict()
        self._lanes: set[ReceivingLane] = set()

    def announce(self, transfer_id: str) -> None:
        """A leg is queued: an Offer of it is parked without a time limit until `expect` or `end`."""
        if transfer_id not in self._ended and transfer_id not in self._incoming:
            self._announced.add(transfer_id)

    def expect(self, transfer_id: str, block_ids: Sequence[int], have: int) -> IncomingTransfer:
        """A leg has KV room: `block_ids` are the pool blocks of the prompt's whole blocks, the first `have` filled.

        With have == len(block_ids) the transfer is committed at once. Raises ProtocolViolation for an id that is in
        use or has ended, ValueError for a bad `have`.
        """
        if transfer_id in self._incoming or transfer_id in self._ended:
            raise ProtocolViolation(f"transfer_id: {transfer_id!r} is or was in use at this stage")
        incoming = IncomingTransfer(self, transfer_id, block_ids, have)
        self._announced.discard(transfer_id)
        self._incoming[transfer_id] = incoming
        self._unpark(transfer_id, incoming)
        return incoming

    def end(self, transfer_id: str) -> None:
        """Ends a transfer, announced, expected or unheard of: nothing is written after it returns. Idempotent."""
        if transfer_id in self._ended:
            return
        self._announced.discard(transfer_id)
        verdict: Committed | Ended = Ended(EndReason.RELEASED)
        incoming = self._incoming.pop(transfer_id, None)
        if incoming is not None:
            incoming.live = False
            verdict = incoming.verdict() or verdict
            incoming.wake()
        self._ended[transfer_id] = verdict
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self._unpark(transfer_id, verdict)

    def lane(self, offer: Offer) -> ReceivingLane:
        """Takes an offer in; the carrier runs the lane and closes it.

        Raises LayoutMismatch with both values, before any byte.
        """
        difference = self.layout.difference(offer.layout)
        if difference is not None:
            raise LayoutMismatch(f"KV layout differs at the receiver: {difference}")
        if offer.block_bytes != self.layout.block_bytes:
            raise LayoutMismatch(f"block_bytes: {self.layout.block_bytes} here, {offer.block_bytes} there")
        lane = ReceivingLane(self, offer)
        self._lanes.add(lane)
        return lane

    def leftovers(self) -> dict[str, int]:
        """What is still held, by kind; all zero when idle."""
        return {
            "incoming_transfers": len(self._incoming),
            "announced_transfers": len(self._announced),
            "parked_offers": sum(map(len, self._parked.values())),
            "receiving_lanes": len(self._lanes),
        }

    async def admit(self, offer: Offer) -> IncomingTransfer | Committed | Ended:
        """Waits until a leg expects the offered transfer. For lanes."""
        if offer.epoch != self.epoch:
            return Ended(EndReason.EPOCH)
        known = self._incoming.get(offer.transfer_id) or self._ended.get(offer.transfer_id)
        return known if known is not None else await self._park(offer.transfer_id)

    def forget(self, lane: ReceivingLane) -> None:
        """The lane has ended. For lanes."""
        self._lanes.discard(lane)

    def count_commit(self, arrivals: Arrivals) -> None:
        """Counts a committed transfer. For transfers."""
        self.stats.committed += 1
        self.stats.blocks_received += arrivals.received
        self.stats.blocks_cached += arrivals.have
        self.stats.bytes_saved += arrivals.have * self.layout.block_bytes

    async def _park(self, transfer_id: str) -> IncomingTransfer | Committed | Ended:
        self.stats.offers_parked += 1
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[IncomingTransfer | Committed | Ended] = loop.create_future()
        self._parked.setdefault(transfer_id, set()).add(waiter)
        timer = loop.call_later(self._offer_wait_s, self._expire, transfer_id, waiter)
        try:
            return await waiter
        finally:
            timer.cancel()
            waiters = self._parked.get(transfer_id, set())
            waiters.discard(waiter)
            if not waiters:
                self._parked.pop(transfer_id, None)

    def _expire(self, transfer_id: str, waiter: "asyncio.Future[IncomingTransfer | Committed | Ended]") -> None:
        if transfer_id not in self._announced and not waiter.done():
            waiter.set_result(Ended(EndReason.UNKNOWN))

    def _unpark(self, transfer_id: str, answer: IncomingTransfer | Committed | Ended) -> None:
        for waiter in self._parked.get(transfer_id, ()):
            if not waiter.done():
                waiter.set_result(answer)
