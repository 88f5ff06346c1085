"""Whose turn it is on a link: pure scheduling, on a carrier that carries nothing."""

import asyncio
from collections.abc import Sequence

import pytest

from kvrelay.transfer import window
from kvrelay.transfer.carrier import Carrier, Lane, Offer, OnAck, ignore
from kvrelay.transfer.feed import BlockFeed
from kvrelay.transfer.frames import Span
from kvrelay.transfer.link import AGING_EVERY, Entry, Link, Slot
from kvrelay.transfer.outbox import Outbox
from kvrelay.types import BlockRange

FRAME = 100_000
"""Five fit the smallest window."""


class NoCarrier:
    def open(self, connection: int, offer: Offer, on_ack: OnAck = ignore) -> Lane:
        raise AssertionError("no lane is opened here")

    async def close(self) -> None:
        return


class Push:
    """A push that asks for frames and acknowledges them when told to."""

    def __init__(
        self, link: Link, blocks: int, published: int | None = None, connections: Sequence[int] = (0,)
    ) -> None:
        self.feed = BlockFeed(range(blocks))
        self.feed.publish(blocks if published is None else published)
        self.outbox = Outbox(FRAME, FRAME)
        self.entry = Entry(self.outbox, self.feed)
        link.join(self.entry)
        self.slots = []
        for lane, connection in enumerate(connections):
            self.outbox.asked(lane, [BlockRange(0, blocks)])
            self.slots.append(Slot(link, self.entry, lane, connection))
        self.slot = self.slots[0]
        self.on = [0] * len(connections)
        """Bytes granted on each lane."""
        self.granted: list[Span] = []
        self.turns: list[int] = []
        self.feed.subscribe(link.pump)
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(self._run(lane)) for lane in range(len(connections))]

    async def _run(self, lane: int) -> None:
        while True:
            spans = await self.slots[lane].next()
            self.on[lane] += sum(span.length for span in spans)
            self.turns.append(len(spans))
            self.granted += spans

    def ack(self) -> None:
        for slot, granted in zip(self.slots, tuple(self.on), strict=True):
            slot.acked(granted)

    async def stop(self, link: Link) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for slot in self.slots:
            slot.close()
        link.leave(self.entry)


def a_link() -> Link:
    carrier: Carrier = NoCarrier()
    return Link("peer", carrier, 4, FRAME)


async def settle() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


async def test_the_window_bounds_all_pushes_together() -> None:
    link = a_link()
    pushes = [Push(link, 50), Push(link, 50)]
    await settle()
    assert sum(len(p.granted) for p in pushes) * FRAME == link.window.in_flight <= link.window.size
    assert link.pending_bytes == 100 * FRAME
    for push in pushes:
        await push.stop(link)
    assert link.window.in_flight == 0
    assert link.pending_bytes == 0


async def test_the_push_with_the_fewest_remaining_bytes_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for allowance in ("LATE_S", "FRAME_S"):  # far more than a round trip here: the window would grow meanwhile
        monkeypatch.setattr(window, allowance, 0.0)
    link = a_link()
    large = Push(link, 500)
    await settle()
    small = Push(link, 6)
    await settle()
    sent_before = len(large.granted)
    while len(small.granted) < 6:
        large.ack()
        small.ack()
        await settle()
    assert len(large.granted) - sent_before <= 6  # what the aging gives, and the last turn
    await large.stop(link)
    await small.stop(link)


async def test_a_large_push_gets_its_share_among_ever_new_small_ones() -> None:
    link = a_link()
    large = Push(link, 500)
    await settle()
    small: list[Push] = []
    for _ in range(60):
        small.append(Push(link, 2))
        await settle()
        for push in (large, *small):
            push.ack()
        await settle()
    assert len(large.granted) >= 5 + 120 // AGING_EVERY - 2
    for push in (large, *small):
        await push.stop(link)


async def test_on_a_fast_link_a_turn_is_of_several_frames_but_never_beyond_the_window_or_what_is_published() -> None:
    link = a_link()
    link.window.rate = 1e9
    push = Push(link, 12, published=2)
    await settle()
    assert push.turns == [2]
    push.feed.publish(12)
    await settle()
    assert push.turns == [2, 3]  # five fit the smallest window
    assert link.window.in_flight == 5 * FRAME
    await push.stop(link)


async def test_only_published_blocks_are_granted_and_publishing_wakes_the_lane() -> None:
    link = a_link()
    push = Push(link, 4, published=1)
    await settle()
    assert [s.block for s in push.granted] == [0]
    push.feed.publish(3)
    await settle()
    assert [s.block for s in push.granted] == [0, 1, 2]
    await push.stop(link)


async def test_a_lane_cancelled_in_its_turn_gives_the_frame_back() -> None:
    link = a_link()
    push = Push(link, 1, published=0)
    await settle()
    push.feed.publish(1)  # grants in this very step ...
    push.tasks[0].cancel()  # ... and the lane never gets to see it
    await settle()
    push.slot.close()
    assert link.window.in_flight == 0
    push.outbox.asked(0, [BlockRange(0, 1)])
    assert push.outbox.has_next(1)
    link.leave(push.entry)


def test_lanes_are_spread_over_the_connections() -> None:
    link = a_link()
    assert [link.claim_connection() for _ in range(6)] == [0, 1, 2, 3, 0, 1]
    link.yield_connection(2)
    assert link.claim_connection() == 2


async def admit_one(link: Link) -> None:
    """Lets one frame more leave, with a queue of 0.2 s before it."""
    link.window.size = link.window.in_flight + FRAME
    link.window.round_trip_s = link.window.size / 1e6 - 0.2
    link.pump()
    await settle()


async def test_a_larger_push_goes_behind_a_smaller_one_on_its_connection_while_that_is_in_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr("kvrelay.transfer.link.time.monotonic", lambda: now)
    link = a_link()
    large = Push(link, 500, connections=(0, 1, 2, 3))
    await settle()
    small = Push(link, 2, connections=(2,))
    await settle()
    await admit_one(link)
    await admit_one(link)
    assert len(small.granted) == 2
    link.window.rate = 1e6
    for after_s, lanes in ((0.19, {2}), (0.02, {0, 1, 2, 3})):
        now += after_s
        before = list(large.on)
        for _ in range(4):
            await admit_one(link)
        assert {lane for lane in range(4) if large.on[lane] > before[lane]} == lanes
    await large.stop(link)
    await small.stop(link)
