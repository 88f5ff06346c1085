"""One direction by itself: order, bounds, rate and stalls, without sockets."""

import asyncio
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.wan.direction import QUEUE_BYTES, Direction, Flow, Item, Mark, Shape
from tests.unit.wan.plumbing import until


class Far:
    """What came out of a flow, and when."""

    def __init__(self, direction: Direction) -> None:
        self.items: list[bytes | Mark] = []
        self.at: list[float] = []
        self.roomy = 0
        self.waiting = 0
        """In the kernel."""
        self.flow: Flow = direction.flow(self._take, self._room)

    def _take(self, item: Item) -> None:
        self.items.append(item if isinstance(item, Mark) else bytes(item))
        self.at.append(time.monotonic())

    def _room(self) -> int:
        self.roomy += 1
        return self.waiting

    @property
    def bytes(self) -> bytes:
        return b"".join(item for item in self.items if not isinstance(item, Mark))


async def come(far: Far, count: int) -> None:
    await until(lambda: len(far.bytes) >= count)


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.binary(min_size=1, max_size=5000), min_size=1, max_size=12),
    st.sampled_from([0.0, 3e6]),
    st.sampled_from([0.0, 0.004]),
)
def test_bytes_and_marks_come_in_order_whatever_the_jitter(pieces: list[bytes], rate: float, jitter_s: float) -> None:
    async def run() -> None:
        direction = Direction(Shape(rate=rate, jitter_s=jitter_s))
        far = Far(direction)
        for piece in pieces:
            far.flow.put(piece)
        far.flow.put(Mark.EOF)
        await come(far, sum(map(len, pieces)))
        await until(lambda: far.items[-1] is Mark.EOF)
        assert far.bytes == b"".join(pieces)
        assert far.items.count(Mark.EOF) == 1
        assert direction.backlog_bytes == 0
        direction.close()

    asyncio.run(run())


async def test_a_flow_queues_what_fits_and_calls_when_there_is_room() -> None:
    direction = Direction(Shape(rate=2e6))
    far = Far(direction)
    while far.flow.room >= 64 * 1024:
        far.flow.put(bytes(64 * 1024))
    assert QUEUE_BYTES - 64 * 1024 < far.flow.queued <= QUEUE_BYTES
    await come(far, 128 * 1024)
    assert far.roomy >= 1
    direction.close()


async def test_only_what_was_in_the_kernel_when_a_full_queue_had_room_counts_as_having_waited_for_it() -> None:
    """Else a late loop would take what its sender sends right after it for old, and deliver it early."""
    direction = Direction(Shape(rate=2e6))
    far = Far(direction)
    far.waiting = 1000
    while far.flow.room >= 64 * 1024:
        far.flow.put(bytes(64 * 1024))
    await until(lambda: far.flow.room >= 100 * 1024)
    before = time.monotonic()
    for _ in range(3):
        far.flow.put(bytes(600))
    first, second, third = (came for came, _ in list(far.flow.queue)[-3:])
    assert first == second == far.flow.roomy_at < before <= third
    direction.close()


async def test_a_busy_flow_does_not_hold_another_back() -> None:
    direction = Direction(Shape(rate=5e6))
    busy, light = Far(direction), Far(direction)
    busy.flow.put(bytes(200_000))  # 40 ms of the link
    light.flow.put(bytes(1000))
    await come(light, 1000)
    assert len(busy.bytes) < 100_000
    direction.close()


async def test_a_capped_flow_leaves_the_rest_of_the_link_to_others() -> None:
    direction = Direction(Shape(connection_rate=1e6))
    flows = [Far(direction) for _ in range(4)]
    began = time.monotonic()
    for far in flows:
        far.flow.put(bytes(200_000))
    for far in flows:
        await come(far, 200_000)
    assert 0.19 < time.monotonic() - began < 0.72  # one after the other they would take 0.8
    direction.close()


async def test_a_stall_stops_the_delay_line_too_and_keeps_its_times() -> None:
    direction = Direction(Shape(delay_s=0.3))
    far = Far(direction)
    began = time.monotonic()
    far.flow.put(b"x")
    await asyncio.sleep(0.2)
    direction.stall(True)
    stalled = time.monotonic()
    await asyncio.sleep(0.15)
    assert far.items == []
    direction.stall(False)
    stall_s = time.monotonic() - stalled
    await come(far, 1)
    assert 0.29 + stall_s < far.at[0] - began < 0.45 + stall_s  # 0.5 and the stall if its time began anew
    direction.close()


async def test_a_blocked_flow_waits_and_the_others_go_on() -> None:
    direction = Direction(Shape(rate=50e6))
    blocked, free = Far(direction), Far(direction)
    blocked.flow.block(True)
    blocked.flow.put(bytes(1000))
    free.flow.put(bytes(1000))
    await come(free, 1000)
    assert blocked.items == []
    blocked.flow.block(False)
    await come(blocked, 1000)
    direction.close()


async def test_a_new_shape_counts_from_the_next_bytes_on() -> None:
    direction = Direction(Shape(rate=1e6))
    far = Far(direction)
    far.flow.put(bytes(250_000))
    await asyncio.sleep(0.02)
    direction.reshape(rate=0.0)
    await come(far, 250_000)
    assert far.at[-1] - far.at[0] < 0.1
    assert direction.bytes == 250_000
    direction.close()


async def test_a_dropped_flow_delivers_nothing_more() -> None:
    direction = Direction(Shape(rate=10e6, delay_s=0.02))
    dropped, other = Far(direction), Far(direction)
    dropped.flow.put(bytes(50_000))
    other.flow.put(bytes(1000))
    dropped.flow.close()
    await come(other, 1000)
    assert dropped.items == []
    direction.close()


def test_jitter_lies_between_nothing_and_itself() -> None:
    direction = Direction(Shape(delay_s=0.02, jitter_s=0.01))
    crossings = [direction.crossing_s() for _ in range(1000)]
    assert 0.02 <= min(crossings) < 0.021
    assert 0.029 < max(crossings) < 0.03
