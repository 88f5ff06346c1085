"""What one push has still to send, what is under way on which lane, what was lost. Pure: no clock, link or bytes."""

import heapq
from collections import deque
from collections.abc import Iterable

from kvrelay.transfer.frames import Span, spans_of
from kvrelay.types import BlockRange


class Outbox:
    """`blocks` blocks of `block_bytes`, cut into frames of at most `frame_bytes`.

    Every span that the receiver asked for is in exactly one place: to do, on its way on a lane, lost with a lane, or
    acknowledged.
    """

    def __init__(self, block_bytes: int, frame_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._frame_bytes = frame_bytes
        self.asked_bytes: int | None = None
        """What the receiver said it misses, at first; None before."""
        self.blocks_asked = 0
        self.remaining_bytes = 0
        """Asked for and not yet acknowledged."""
        self._todo: list[Span] = []
        self._sent: dict[int, deque[Span]] = {}
        """By live lane, in the order of sending."""
        self._acked: dict[int, int] = {}
        """By live lane: payload bytes acknowledged of spans that are out of `_sent`."""
        self._lost: dict[int, list[Span]] = {}
        """By lane number: sent and never acknowledged when the lane broke."""

    @property
    def lanes_live(self) -> int:
        """Lanes that have heard what is missing and are not lost."""
        return len(self._sent)

    def asked(self, lane: int, ranges: Iterable[BlockRange]) -> None:
        """The receiver lacks `ranges`, it says on a lane that opens (again)."""
        missing = [block for r in ranges for block in range(r.first, r.end)]
        lost = self._lost.pop(lane, [])
        if not self._sent:
            # No other lane has anything under way: the receiver's word is the whole truth.
            self._lost.clear()
            self._todo = [span for b in missing for span in spans_of(b, self._block_bytes, self._frame_bytes)]
        else:
            wanted = set(missing)
            for span in lost:
                if span.block in wanted:
                    heapq.heappush(self._todo, span)
        self._open(lane)
        if self.asked_bytes is None:
            self.asked_bytes = len(missing) * self._block_bytes
            self.blocks_asked = len(missing)
        self._recount()

    def has_next(self, published: int) -> bool:
        """A span may be sent now, with so many blocks published."""
        return bool(self._todo) and self._todo[0].block < published

    @property
    def next_length(self) -> int:
        """Bytes of the next span. Only after `has_next`."""
        return self._todo[0].length

    def take(self, lane: int, published: int) -> Span:
        """The next span, from now on under way on `lane`. Only after `has_next`."""
        assert self.has_next(published)
        span = heapq.heappop(self._todo)
        self._sent[lane].append(span)
        return span

    def acked(self, lane: int, payload_bytes: int) -> int:
        """The receiver has taken so many payload bytes on this lane in all; how many spans that newly covers."""
        sent, covered = self._sent[lane], 0
        while sent and self._acked[lane] + sent[0].length <= payload_bytes:
            span = sent.popleft()
            self._acked[lane] += span.length
            self.remaining_bytes -= span.length
            covered += 1
        return covered

    def lose(self, lane: int) -> None:
        """The lane broke; what was under way on it waits for the next `asked` of that lane, or `requeue`."""
        self._acked.pop(lane, None)
        under_way = self._sent.pop(lane, None)
        if under_way:
            self._lost.setdefault(lane, []).extend(under_way)

    def requeue(self, lane: int) -> None:
        """The lane will not open again: what was lost with it is to do for the others, received or not."""
        for span in self._lost.pop(lane, []):
            heapq.heappush(self._todo, span)

    def check_integrity(self) -> None:
        """AssertionError if a span is in two places or the sum is wrong."""
        places = [
            *self._todo,
            *(s for q in self._sent.values() for s in q),
            *(s for q in self._lost.values() for s in q),
        ]
        assert len(places) == len(set(places)), "a span is in two places"
        assert sum(s.length for s in places) == self.remaining_bytes, "remaining bytes"

    def _open(self, lane: int) -> None:
        assert lane not in self._sent, f"lane {lane} is open already"
        self._sent[lane] = deque()
        self._acked[lane] = 0

    def _recount(self) -> None:
        waiting = sum(span.length for span in self._todo)
        under_way = sum(span.length for spans in self._sent.values() for span in spans)
        lost = sum(span.length for spans in self._lost.values() for span in spans)
        self.remaining_bytes = waiting + under_way + lost
