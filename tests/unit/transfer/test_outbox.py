"""The sender's bookkeeping: whatever breaks, every missing byte is sent, and never two lanes at once send the same."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.transfer.arrivals import Arrivals
from kvrelay.transfer.frames import Span
from kvrelay.transfer.outbox import Outbox

BLOCK, FRAME = 10, 4


class PushMachine(RuleBasedStateMachine):
    """A sender's outbox against a receiver's arrivals, with lanes that deliver, acknowledge and break at any moment."""

    @initialize(blocks=st.integers(0, 6), data=st.data())
    def begin(self, blocks: int, data: st.DataObject) -> None:
        self.blocks = blocks
        have = data.draw(st.integers(0, blocks))
        self.arrivals = Arrivals(blocks, have, BLOCK)
        self.outbox = Outbox(BLOCK, FRAME)
        self.published = 0
        self.wires: dict[int, list[Span]] = {}
        """By open lane: sent, not yet at the receiver."""
        self.taken: dict[int, int] = {}
        """By open lane: payload bytes the receiver took."""
        self.broken: set[int] = set()

    @rule(n=st.integers(0, 6))
    def publish(self, n: int) -> None:
        self.published = max(self.published, min(n, self.blocks))

    @rule(lane=st.integers(0, 2))
    def open_lane(self, lane: int) -> None:
        if lane not in self.wires and (lane == 0 or self.outbox.asked_bytes is not None):
            self.outbox.asked(lane, self.arrivals.missing())
            self.wires[lane], self.taken[lane] = [], 0
            self.broken.discard(lane)

    @precondition(lambda self: self.wires)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.wires)))
        if self.outbox.has_next(self.published):
            length = self.outbox.next_length
            span = self.outbox.take(lane, self.published)
            assert span.block < self.published
            assert span.length == length <= FRAME
            self.wires[lane].append(span)

    @precondition(lambda self: any(self.wires.values()))
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(lane for lane, wire in self.wires.items() if wire)))
        span = self.wires[lane].pop(0)
        self.arrivals.add(span.block, span.offset, span.length)
        self.taken[lane] += span.length

    @precondition(lambda self: self.wires)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.wires)))
        before = self.outbox.remaining_bytes
        covered = self.outbox.acked(lane, self.taken[lane])
        assert (covered > 0) == (self.outbox.remaining_bytes < before)
        assert self.outbox.acked(lane, self.taken[lane]) == 0

    @precondition(lambda self: self.wires)
    @rule(data=st.data())
    def break_lane(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.wires)))
        self.outbox.lose(lane)
        del self.wires[lane], self.taken[lane]
        self.broken.add(lane)

    @precondition(lambda self: self.broken and self.wires)
    @rule(data=st.data())
    def give_lane_up(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.broken)))
        self.outbox.requeue(lane)

    @invariant()
    def every_span_is_in_one_place(self) -> None:
        self.outbox.check_integrity()

    def teardown(self) -> None:
        """From any state on: publish all, open every broken lane (or one) again, deliver; everything arrives."""
        if not hasattr(self, "outbox"):
            return
        self.published = self.blocks
        for lane in sorted(self.broken) or ([] if self.wires else [0]):
            self.open_lane(lane)
        while self.outbox.has_next(self.published):
            lane = min(self.wires)
            self.wires[lane].append(self.outbox.take(lane, self.published))
        for lane, wire in self.wires.items():
            for span in wire:
                self.arrivals.add(span.block, span.offset, span.length)
                self.taken[lane] += span.length
            self.outbox.acked(lane, self.taken[lane])
        assert self.arrivals.complete
        assert self.outbox.remaining_bytes == 0


TestPush = PushMachine.TestCase
TestPush.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
