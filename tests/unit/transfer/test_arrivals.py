"""The receiver's bookkeeping against a plain model: sets of bytes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvrelay.transfer.arrivals import Arrivals
from kvrelay.types import BlockRange

SIZE = 12


class ArrivalsMachine(RuleBasedStateMachine):
    """Frames come in any order, overlapping and more than once."""

    @initialize(blocks=st.integers(0, 6), data=st.data())
    def begin(self, blocks: int, data: st.DataObject) -> None:
        self.blocks = blocks
        self.have = data.draw(st.integers(0, blocks))
        self.arrivals = Arrivals(blocks, self.have, SIZE)
        self.bytes = {b: set(range(SIZE)) if b < self.have else set[int]() for b in range(blocks)}

    @rule(data=st.data())
    def frame(self, data: st.DataObject) -> None:
        if not self.blocks:
            return
        block = data.draw(st.integers(0, self.blocks - 1))
        offset = data.draw(st.integers(0, SIZE - 1))
        length = data.draw(st.integers(1, SIZE - offset))
        before = len(self.bytes[block]) == SIZE
        self.bytes[block].update(range(offset, offset + length))
        assert self.arrivals.add(block, offset, length) == (not before and len(self.bytes[block]) == SIZE)

    @invariant()
    def agrees_with_the_model(self) -> None:
        whole = [len(self.bytes[b]) == SIZE for b in range(self.blocks)]
        arrivals = self.arrivals
        assert arrivals.complete == all(whole)
        assert arrivals.leading == next((b for b, w in enumerate(whole) if not w), self.blocks)
        assert arrivals.received == sum(whole) - self.have
        assert [b for r in arrivals.missing() for b in range(r.first, r.end)] == [
            b for b, w in enumerate(whole) if not w
        ]
        assert [arrivals.is_whole(b) for b in range(self.blocks)] == whole


TestArrivals = ArrivalsMachine.TestCase
TestArrivals.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@given(st.integers(0, 5), st.integers(-2, 8))
def test_have_lies_between_nothing_and_everything(blocks: int, have: int) -> None:
    if 0 <= have <= blocks:
        assert Arrivals(blocks, have, SIZE).leading == have
    else:
        with pytest.raises(ValueError, match=f"have {have} of {blocks}"):
            Arrivals(blocks, have, SIZE)


def test_bytes_that_are_here_or_being_written_cannot_be_claimed() -> None:
    arrivals = Arrivals(3, 1, 100)
    assert not arrivals.claim(0, 0, 10)  # it was here from the start
    arrivals.add(1, 0, 40)
    assert not arrivals.claim(1, 39, 10)
    assert arrivals.claim(1, 40, 10)
    assert not arrivals.claim(1, 49, 10)
    assert arrivals.claim(1, 50, 50)
    assert arrivals.claimed(1, 0, 41) and not arrivals.claimed(1, 0, 40) and not arrivals.claimed(2, 0, 100)


def test_a_claim_that_is_given_up_may_be_made_again() -> None:
    arrivals = Arrivals(1, 0, 100)
    assert arrivals.claim(0, 0, 100)
    arrivals.unclaim(0, 0, 100)
    assert arrivals.missing() == (BlockRange(0, 1),)
    assert arrivals.claim(0, 0, 100)
    arrivals.unclaim(0, 0, 100)
    assert arrivals.add(0, 0, 100)
    assert arrivals.complete
