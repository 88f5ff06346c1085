"""A push over a lane that does what the test says: what it counts, however it ends."""

import asyncio
from collections.abc import Iterable

from kvrelay.transfer.carrier import Answer, Carrier, Frame, Lane, Missing, Offer, OnAck, ignore
from kvrelay.transfer.feed import BlockFeed
from kvrelay.transfer.push import PushOutcome
from kvrelay.transfer.sender import KvSender
from kvrelay.types import BlockRange, KvTarget, Role
from tests.unit.transfer.rig import EPOCH, FakePool, layout_of, until


class StuckLane:
    """Takes the first frame of a turn, and never more."""

    def __init__(self, offer: Offer) -> None:
        self.wire_bytes = 0
        self.sending = asyncio.Event()
        self._missing = [Missing((BlockRange(0, offer.blocks),), offer.blocks * offer.block_bytes)]

    async def send(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            self.wire_bytes += len(frame.payload) + 10
            self.sending.set()
            await asyncio.Event().wait()

    async def receive(self) -> Answer:
        if not self._missing:
            await asyncio.Event().wait()
        return self._missing.pop()

    def close(self) -> None:
        return


class StuckCarrier:
    def __init__(self) -> None:
        self.lanes: list[StuckLane] = []

    def open(self, connection: int, offer: Offer, on_ack: OnAck = ignore) -> Lane:
        self.lanes.append(StuckLane(offer))
        return self.lanes[-1]

    async def close(self) -> None:
        return


async def test_a_cancelled_push_counts_what_its_turn_under_way_has_sent() -> None:
    layout = layout_of(8)
    stuck = StuckCarrier()

    def carrier(target: KvTarget, connections: int) -> Carrier:
        return stuck

    async with KvSender(FakePool(layout, 4), layout, carrier=carrier, connections=1) as sender:
        feed = BlockFeed(range(4))
        feed.publish(4)
        push = sender.push(KvTarget("main-1", "127.0.0.1:1", EPOCH, "t1", Role.MAIN), "r1", feed)
        async with asyncio.timeout(5.0):
            await until(lambda: stuck.lanes)
            await stuck.lanes[0].sending.wait()
            push.cancel()
            result = await push.done()
    assert result.outcome is PushOutcome.ENDED
    assert result.wire_bytes == 8192 + 10
