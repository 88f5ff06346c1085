"""A lane acknowledges what it took: at once when that is rare, seldom when it is much."""

import pytest

from kvrelay.transfer import receiving
from kvrelay.transfer.carrier import Ack, Frame, Missing, Offer
from kvrelay.transfer.frames import checksum
from kvrelay.transfer.receiver import KvReceiver
from kvrelay.transfer.receiving import ReceivingLane
from tests.unit.transfer.rig import EPOCH, FakePool, layout_of, until

LAYOUT = layout_of(64)
SIZE = LAYOUT.block_bytes
BLOCKS = 8


def taken(lane: ReceivingLane, block: int) -> None:
    payload = bytes(SIZE)
    lane.take(Frame("t1", block, 0, checksum(payload), payload))


def a_receiver() -> KvReceiver:
    return KvReceiver(FakePool(LAYOUT, BLOCKS), LAYOUT, epoch=EPOCH)


OFFER = Offer("t1", "r1", LAYOUT, BLOCKS, SIZE, EPOCH, 0)


async def test_a_lone_frame_is_acknowledged_at_once_and_what_follows_it_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(receiving, "ACK_EVERY_S", 0.2)
    receiver = a_receiver()
    with_acks: list[int] = []
    async with receiver.expect("t1", range(BLOCKS), 0):
        lane = receiver.lane(OFFER)
        replies = lane.replies()
        assert isinstance(await anext(replies), Missing)
        lane.ack_elsewhere = with_acks.append
        for block in range(3):
            taken(lane, block)
        assert with_acks == [SIZE]
        await until(lambda: len(with_acks) > 1)
        assert with_acks == [SIZE, 3 * SIZE]
        lane.close()
        await replies.aclose()


async def test_much_is_acknowledged_without_waiting_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "REPLY_EVERY_S", 60.0)
    monkeypatch.setattr(receiving, "ACK_BYTES", 2 * SIZE)
    receiver = a_receiver()
    async with receiver.expect("t1", range(BLOCKS), 0):
        lane = receiver.lane(OFFER)
        replies = lane.replies()
        assert isinstance(await anext(replies), Missing)
        for block in range(5):
            taken(lane, block)
        assert await anext(replies) == Ack(5 * SIZE)  # of one frame, then twice of two
        taken(lane, 5)
        lane.close()  # what is left to be acknowledged is left
        await replies.aclose()
