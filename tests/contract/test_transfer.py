"""What every carrier of KV frames must do, seen from both ends: the whole life of transfers that meet no outage."""

import asyncio
from dataclasses import replace

import pytest

from kvrelay.errors import ProtocolViolation
from kvrelay.kvcache.pool import KvPool
from kvrelay.transfer import patience
from kvrelay.transfer.carrier import Frame, LaneLost, Missing
from kvrelay.transfer.feed import BlockFeed
from kvrelay.transfer.frames import checksum
from kvrelay.transfer.push import PushOutcome
from kvrelay.transfer.receiver import KvReceiver
from kvrelay.transfer.sender import KvSender
from kvrelay.types import KvTarget, Role
from tests.contract.offers import frame_of, offer_of
from tests.unit.transfer.rig import CARRIERS, EPOCH, idle, layout_of, rigged, until

pytestmark = pytest.mark.parametrize("carrier", sorted(CARRIERS))


async def test_every_block_arrives_and_both_sides_say_so(carrier: str) -> None:
    async with rigged(carrier) as rig:
        async with rig.receiver.expect("t1", range(8), 0) as incoming:
            result = await rig.push().done()
            assert await incoming.committed() == 8
            assert rig.arrived
            assert result.outcome is PushOutcome.COMMITTED
            assert (result.blocks_sent, result.blocks_cached) == (8, 0)
            assert 8 * 8192 < result.wire_bytes < 8 * 8192 + 8 * 100
            assert (rig.sender.stats.blocks_sent, rig.receiver.stats.blocks_received) == (8, 8)


async def test_blocks_go_where_the_receiver_put_them(carrier: str) -> None:
    async with rigged(carrier, blocks=4) as rig:
        async with rig.receiver.expect("t1", [3, 1, 0, 2], 0) as incoming:
            rig.push(feed=rig.feed(ids=[1, 0, 2, 3]))
            await incoming.committed()
        for there, here in ((3, 1), (1, 0), (0, 2), (2, 3)):
            assert rig.pool.read(there) == rig.source.read(here)


@pytest.mark.parametrize("have", [1, 5, 7])
async def test_only_what_the_receiver_lacks_crosses(carrier: str, have: int) -> None:
    async with rigged(carrier) as rig, rig.receiver.expect("t1", range(8), have):
        result = await rig.push().done()
        assert (result.blocks_sent, result.blocks_cached) == (8 - have, have)
        assert rig.pool.touched == set(range(have, 8))
        assert rig.sender.stats.bytes_saved == have * 8192 == rig.receiver.stats.bytes_saved


async def test_a_receiver_that_has_everything_commits_before_the_offer(carrier: str) -> None:
    async with rigged(carrier) as rig:
        async with rig.receiver.expect("t1", range(8), 8) as incoming:
            assert await incoming.committed() == 0
            result = await rig.push().done()
            assert (result.outcome, result.blocks_cached) == (PushOutcome.COMMITTED, 8)
        # Its leg may even have ended by then: that is still no failure of the push.
        late = await rig.push().done()
        assert late.outcome is PushOutcome.COMMITTED
        assert not rig.pool.touched


async def test_a_prompt_shorter_than_a_block_has_nothing_to_push(carrier: str) -> None:
    async with rigged(carrier) as rig, rig.receiver.expect("t1", [], 0) as incoming:
        assert await incoming.committed() == 0
        result = await rig.push(feed=rig.feed(ids=[])).done()
        assert (result.outcome, result.blocks_sent, result.wire_bytes) == (PushOutcome.COMMITTED, 0, 0)


async def test_a_block_larger_than_a_frame_comes_in_several(carrier: str) -> None:
    async with rigged(carrier, blocks=3, block_kib=700) as rig, rig.receiver.expect("t1", range(3), 0):
        assert (await rig.push().done()).outcome is PushOutcome.COMMITTED
        assert rig.arrived
        assert rig.receiver.stats.frames == 9


async def test_a_block_of_several_frames_is_read_from_the_pool_once(
    carrier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the pool is not in host memory, each reading copies all of the block."""
    async with rigged(carrier, block_kib=64, frame_bytes=8192, connections=1) as rig:
        reads: list[int] = []
        read = rig.source.read
        monkeypatch.setattr(rig.source, "read", lambda block: reads.append(block) or read(block))
        async with rig.receiver.expect("t1", range(8), 0):
            assert (await rig.push().done()).outcome is PushOutcome.COMMITTED
        assert rig.arrived
        assert reads == list(range(8))


async def test_blocks_cross_while_later_ones_are_still_computed(carrier: str) -> None:
    async with rigged(carrier) as rig, rig.receiver.expect("t1", range(8), 2) as incoming:
        feed = rig.feed(0)
        push = rig.push(feed=feed)
        for n in range(9):
            feed.publish(n)
            await until(lambda n=n: incoming.leading_blocks == max(n, 2))  # type: ignore[misc]
            assert incoming.is_committed == (n == 8)
        assert (await push.done()).blocks_sent == 6


async def test_an_offer_that_comes_before_its_leg_waits_for_it(carrier: str) -> None:
    async with rigged(carrier) as rig:
        push = rig.push()
        await until(lambda: rig.receiver.leftovers()["parked_offers"] == 1)
        async with rig.receiver.expect("t1", range(8), 0) as incoming:
            assert await incoming.committed() == 8
        assert (await push.done()).outcome is PushOutcome.COMMITTED


async def test_an_offer_that_no_leg_wants_ends_after_the_wait(carrier: str) -> None:
    async with rigged(carrier, offer_wait_s=0.1) as rig:
        result = await rig.push().done()
        assert (result.outcome, result.detail) == (PushOutcome.ENDED, "unknown")
        assert rig.sender.stats.ended == 1


async def test_an_announced_transfer_may_wait_longer_than_that(carrier: str) -> None:
    async with rigged(carrier, offer_wait_s=0.05) as rig:
        rig.receiver.announce("t1")
        push = rig.push()
        await asyncio.sleep(0.2)
        assert rig.receiver.leftovers()["parked_offers"] == 1
        async with rig.receiver.expect("t1", range(8), 0):
            assert (await push.done()).outcome is PushOutcome.COMMITTED


async def test_a_queued_leg_that_is_closed_ends_the_waiting_offer(carrier: str) -> None:
    async with rigged(carrier) as rig:
        rig.receiver.announce("t1")
        push = rig.push()
        await until(lambda: rig.receiver.leftovers()["parked_offers"] == 1)
        rig.receiver.end("t1")
        result = await push.done()
        assert (result.outcome, result.detail) == (PushOutcome.ENDED, "released")


async def test_an_offer_after_the_end_is_refused_at_once(carrier: str) -> None:
    async with rigged(carrier, offer_wait_s=60.0) as rig:
        rig.receiver.end("t1")
        async with asyncio.timeout(5.0):
            result = await rig.push().done()
        assert (result.outcome, result.detail) == (PushOutcome.ENDED, "released")


async def test_an_ended_or_running_transfer_cannot_be_expected_again(carrier: str) -> None:
    async with rigged(carrier) as rig:
        async with rig.receiver.expect("t1", range(8), 0):
            with pytest.raises(ProtocolViolation, match="t1"):
                rig.receiver.expect("t1", range(8), 0)
        with pytest.raises(ProtocolViolation, match="t1"):
            rig.receiver.expect("t1", range(8), 0)


async def test_a_restarted_receiver_takes_nothing(carrier: str) -> None:
    async with rigged(carrier) as rig, rig.receiver.expect("t1", range(8), 0):
        result = await rig.push(epoch=EPOCH + 1).done()
        assert (result.outcome, result.detail) == (PushOutcome.ENDED, "epoch")
        assert not rig.pool.touched


async def test_another_layout_is_refused_with_both_values_before_any_byte(carrier: str) -> None:
    async with rigged(carrier) as rig, rig.receiver.expect("t1", range(8), 0):
        rig.receiver.layout = layout_of(16)
        result = await rig.push().done()
        assert result.outcome is PushOutcome.FAILED
        assert "layers: 4 here, 2 there" in result.detail
        assert (result.wire_bytes, rig.sender.stats.resumes) == (0, 0)


async def test_another_number_of_blocks_is_refused_with_both_values(carrier: str) -> None:
    async with rigged(carrier) as rig, rig.receiver.expect("t1", range(7), 0):
        result = await rig.push().done()
        assert result.outcome is PushOutcome.FAILED
        assert "8, but the leg has 7" in result.detail
        assert not rig.pool.touched


async def test_a_feed_that_fails_ends_the_push_with_its_reason(carrier: str) -> None:
    async with rigged(carrier) as rig, rig.receiver.expect("t1", range(8), 0) as incoming:
        feed = rig.feed(3)
        push = rig.push(feed=feed)
        await until(lambda: (now := push.progress()) and now.payload_bytes_acked == 3 * 8192)
        feed.fail(RuntimeError("the engine died"))
        result = await push.done()
        assert (result.outcome, result.blocks_sent) == (PushOutcome.FAILED, 3)
        assert "the engine died" in result.detail
        assert not incoming.is_committed


async def test_two_pushes_of_one_feed_do_not_wait_for_each_other(carrier: str) -> None:
    async with rigged(carrier) as near, rigged(carrier) as far:
        feed = near.feed(4)
        async with near.receiver.expect("t1", range(8), 0) as at_near:
            quick = near.sender.push(near.target("t1"), "r1", feed)
            slow = near.sender.push(far.target("t2", instance_id="other"), "r1", feed)  # its leg does not come
            await until(lambda: at_near.leading_blocks == 4)
            feed.publish(8)
            assert (await quick.done()).outcome is PushOutcome.COMMITTED
        slow.cancel()
        assert (await slow.done()).outcome is PushOutcome.ENDED
        assert {link.peer for link in near.sender.links()} == {"main-1", "other"}


async def test_a_damaged_frame_is_not_written_and_its_block_is_asked_for_again(carrier: str) -> None:
    damaged: list[int] = []

    def meddle(frame: Frame) -> Frame:
        if frame.block == 3 and not damaged:
            damaged.append(frame.block)
            payload = bytes([frame.payload[0] ^ 1]) + frame.payload[1:]
            return replace(frame, crc32c=checksum(frame.payload), payload=payload)
        return frame

    async with rigged(carrier, meddle=meddle) as rig, rig.receiver.expect("t1", range(8), 0):
        result = await rig.push().done()
        assert result.outcome is PushOutcome.COMMITTED
        assert rig.arrived
        assert (rig.receiver.stats.crc_errors, rig.sender.stats.resumes) == (1, 1)


async def test_a_path_that_damages_everything_is_given_up(carrier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "LONGEST_WAIT_S", 0.1)

    def meddle(frame: Frame) -> Frame:
        return replace(frame, crc32c=checksum(frame.payload) ^ 1)

    async with rigged(carrier, meddle=meddle, resume_wait_s=0.2) as rig:
        async with rig.receiver.expect("t1", range(8), 0) as incoming:
            result = await rig.push().done()
            assert result.outcome is PushOutcome.FAILED
            assert "main-1" in result.detail
            assert rig.receiver.stats.crc_errors >= 8
            assert rig.pool.in_place or not rig.pool.touched
            assert incoming.leading_blocks == 0


@pytest.mark.parametrize(
    ("block", "offset", "length", "transfer_id"),
    [(8, 0, 10, "t1"), (0, 8190, 10, "t1"), (0, 0, 0, "t1"), (0, 0, 8192, "another")],
)
async def test_a_frame_outside_the_transfer_breaks_its_lane_only(
    carrier: str, block: int, offset: int, length: int, transfer_id: str
) -> None:
    async with rigged(carrier) as rig, rig.receiver.expect("t1", range(8), 0):
        peer = rig.watch.factory(rig.target(), 1)
        lane = peer.open(0, offer_of(rig))
        assert isinstance(await lane.receive(), Missing)
        payload = bytes(length)
        await lane.send([Frame(transfer_id, block, offset, checksum(payload), payload)])
        with pytest.raises(LaneLost, match="frame"):
            await lane.receive()
        lane.close()
        await peer.close()
        assert (rig.receiver.stats.frames_bad, rig.pool.touched) == (1, set())
        assert (await rig.push().done()).outcome is PushOutcome.COMMITTED


async def test_frames_that_come_again_or_overlap_change_nothing(carrier: str) -> None:
    async with rigged(carrier, blocks=2) as rig, rig.receiver.expect("t1", range(2), 0) as incoming:
        peer = rig.watch.factory(rig.target(), 1)
        lane = peer.open(0, offer_of(rig))
        await lane.receive()
        for offset, length in ((4000, 4192), (0, 5000), (100, 50), (0, 8192)):
            await lane.send([frame_of(rig, 1, offset=offset, length=length)])
        await lane.send([frame_of(rig, 1)])
        await until(lambda: rig.receiver.stats.frames == 5)
        assert rig.receiver.stats.frames_repeated == 3
        await lane.send([frame_of(rig, 0)])
        assert await incoming.committed() == 2
        assert rig.arrived
        lane.close()
        await peer.close()


async def test_a_large_push_uses_several_connections_and_a_small_one_the_first(carrier: str) -> None:
    async with rigged(carrier, blocks=10, block_kib=1024, connections=4) as rig:
        async with rig.receiver.expect("t1", range(10), 0):
            assert (await rig.push("t1").done()).outcome is PushOutcome.COMMITTED
            assert rig.arrived
            assert {connection for connection, _ in rig.watch.opened} == {0, 1, 2}
            assert sorted(offer.lane for _, offer in rig.watch.opened) == [0, 1, 2]
        rig.watch.opened.clear()
        async with rig.receiver.expect("t2", range(10), 9):
            await rig.push("t2").done()
            assert [connection for connection, _ in rig.watch.opened] == [0]


async def test_progress_is_told_from_what_is_missing_to_the_last_byte(carrier: str) -> None:
    async with rigged(carrier) as rig, rig.receiver.expect("t1", range(8), 2):
        feed = rig.feed(4)
        push = rig.push(feed=feed)
        assert push.progress() is None
        first = await push.progressed(None)
        assert first is not None
        assert first.payload_bytes_missing == 6 * 8192
        seen = first
        while seen.payload_bytes_acked < 2 * 8192:
            moved = await push.progressed(seen)
            assert moved is not None
            seen = moved
        feed.publish(8)
        await push.done()
        assert await push.progressed(seen) is None
        last = push.progress()
        assert last is not None
        assert last.payload_bytes_acked == 6 * 8192


async def test_leaving_the_sender_ends_what_still_runs(carrier: str) -> None:
    async with rigged(carrier) as rig, rig.receiver.expect("t1", range(8), 0):
        push = rig.push(feed=rig.feed(2))
        await until(lambda: push.progress() is not None)
        await rig.sender.__aexit__()
        assert (await push.done()).outcome is PushOutcome.ENDED
        await idle(rig.sender.leftovers)


async def test_many_transfers_at_once_all_arrive(carrier: str) -> None:
    async with rigged(carrier, blocks=64) as rig:
        legs = [rig.receiver.expect(f"t{i}", range(i, i + 8), i % 3) for i in range(0, 56, 8)]
        pushes = [rig.push(f"t{i}", rig.feed(ids=range(i, i + 8))) for i in range(0, 56, 8)]
        results = await asyncio.gather(*(push.done() for push in pushes))
        assert {result.outcome for result in results} == {PushOutcome.COMMITTED}
        for leg in legs:
            leg.end()


async def test_the_real_pool_gives_and_takes_the_same_bytes(carrier: str) -> None:
    layout = layout_of(64)
    source, pool = KvPool(layout, 6), KvPool(layout, 6)
    source.tensor.normal_()
    receiver = KvReceiver(pool, layout, epoch=EPOCH)
    kind = CARRIERS[carrier]
    async with kind.serve(receiver) as address, KvSender(source, layout, carrier=kind.factory()) as sender:
        async with receiver.expect("t1", [5, 4, 3, 2, 1, 0], 1) as incoming:
            feed = BlockFeed(range(6))
            feed.publish(6)
            push = sender.push(KvTarget("main-1", address, EPOCH, "t1", Role.MAIN), "r1", feed)
            assert await incoming.committed() == 5
            assert (await push.done()).outcome is PushOutcome.COMMITTED
        assert pool.tensor[:5].flip(0).equal(source.tensor[1:])
        assert not pool.tensor[5].any()
        await idle(sender.leftovers, receiver.leftovers)
