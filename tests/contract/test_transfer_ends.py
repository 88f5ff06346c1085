"""What every carrier of KV frames must do when a transfer ends early, whoever ends it, and whatever still comes."""

import asyncio
import contextlib

import pytest

from kvrelay.transfer.carrier import Ended, EndReason, LaneLost, Missing
from kvrelay.transfer.push import PushOutcome
from tests.contract.offers import frame_of, offer_of
from tests.unit.transfer.rig import CARRIERS, rigged, until

pytestmark = pytest.mark.parametrize("carrier", sorted(CARRIERS))


@pytest.mark.parametrize("phase", ["parked", "waiting for blocks", "mid-transfer", "after the commit"])
async def test_the_sender_may_cancel_at_any_time(carrier: str, phase: str) -> None:
    async with rigged(carrier) as rig:
        incoming = rig.receiver.expect("t1", range(8), 0) if phase != "parked" else None
        feed = rig.feed({"parked": 8, "waiting for blocks": 0, "mid-transfer": 5, "after the commit": 8}[phase])
        push = rig.push(feed=feed)
        if incoming is None:
            await until(lambda: rig.receiver.leftovers()["parked_offers"] == 1)
        else:
            await until(lambda: incoming.leading_blocks == feed.published and push.progress() is not None)
        if phase == "after the commit":
            await push.done()
        push.cancel()
        result = await push.done()
        expected = PushOutcome.COMMITTED if phase == "after the commit" else PushOutcome.ENDED
        assert result.outcome is expected
        await until(lambda: rig.receiver.leftovers()["receiving_lanes"] == 0)
        if incoming is not None:
            assert incoming.leading_blocks == feed.published  # what has come stays
            incoming.end()


@pytest.mark.parametrize("phase", ["before the offer", "waiting for blocks", "mid-transfer", "after the commit"])
async def test_the_receiver_may_end_at_any_time(carrier: str, phase: str) -> None:
    async with rigged(carrier) as rig:
        incoming = rig.receiver.expect("t1", range(8), 0)
        if phase == "before the offer":
            incoming.end()
        feed = rig.feed(8 if phase in ("before the offer", "after the commit") else 5 * (phase == "mid-transfer"))
        push = rig.push(feed=feed)
        if phase != "before the offer":
            await until(lambda: incoming.leading_blocks == feed.published and push.progress() is not None)
        incoming.end()
        before = bytes(rig.pool.bytes)
        feed.publish(8)
        result = await push.done()
        committed = phase == "after the commit"
        assert result.outcome is (PushOutcome.COMMITTED if committed else PushOutcome.ENDED)
        assert result.detail == ("" if committed else "released")
        assert rig.pool.bytes == before
        incoming.end()


async def test_cancel_and_end_and_commit_in_one_tick_leave_nothing(carrier: str) -> None:
    async with rigged(carrier) as rig:
        for i in range(20):
            incoming = rig.receiver.expect(f"t{i}", range(8), 0)
            push = rig.push(f"t{i}")
            if i % 4:
                await until(lambda p=push: p.progress() is not None)  # type: ignore[misc]
            if i % 2:
                push.cancel()
            incoming.end()
            assert (await push.done()).outcome in (PushOutcome.ENDED, PushOutcome.COMMITTED)


async def test_frames_after_the_end_are_refused_and_never_written(carrier: str) -> None:
    async with rigged(carrier) as rig:
        incoming = rig.receiver.expect("t1", range(8), 0)
        peer = rig.watch.factory(rig.target(), 1)
        lane = peer.open(0, offer_of(rig))
        assert isinstance(await lane.receive(), Missing)
        await lane.send([frame_of(rig, 0)])
        await until(lambda: incoming.leading_blocks == 1)
        incoming.end()
        before = bytes(rig.pool.bytes)
        with contextlib.suppress(LaneLost):  # the lane may be closed under it
            for block in range(1, 8):
                await lane.send([frame_of(rig, block)])
                await asyncio.sleep(0.01)
            assert await lane.receive() == Ended(EndReason.RELEASED)
        assert rig.pool.bytes == before
        lane.close()
        await peer.close()


async def test_the_fence_holds_for_frames_that_are_already_here(carrier: str) -> None:
    async with rigged(carrier) as rig:
        incoming = rig.receiver.expect("t1", range(8), 0)
        lane = rig.receiver.lane(offer_of(rig))
        replies = lane.replies()
        assert isinstance(await anext(replies), Missing)
        lane.take(frame_of(rig, 0))
        incoming.end()
        lane.take(frame_of(rig, 1))
        assert rig.pool.written == [(0, 0, 8192)]
        assert rig.receiver.stats.frames_late == 1
        assert await anext(replies) == Ended(EndReason.RELEASED)
        assert await anext(replies, None) is None
        lane.close()
