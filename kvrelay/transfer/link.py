"""One peer's link: which push may send its next frame, when, and on which lane. Moves no bytes itself."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field

from kvrelay.transfer.carrier import Carrier
from kvrelay.transfer.feed import BlockFeed
from kvrelay.transfer.frames import Span
from kvrelay.transfer.outbox import Outbox
from kvrelay.transfer.window import MAX_TURN_FRAMES, Flight, Window

AGING_EVERY = 8
"""Of so many turns one goes to the push that has been here longest, however much it has left: none starves."""


@dataclass(eq=False, slots=True)
class Entry:
    """A push as its link sees it."""

    outbox: Outbox
    feed: BlockFeed
    idle: deque["Slot"] = field(default_factory=deque)
    """Its lanes that wait for a frame."""
    sent_on: dict[int, float] = field(default_factory=dict)
    """By connection: when its last frame left there."""

    @property
    def ready(self) -> bool:
        """It has a lane that waits and a frame for it."""
        return bool(self.idle) and self.outbox.has_next(self.feed.published)


class Link:
    """Shared by all pushes to one peer: the window, and whose turn it is (fewest remaining bytes first, with aging)."""

    def __init__(self, peer: str, carrier: Carrier, connections: int, frame_bytes: int) -> None:
        self.peer = peer
        self.carrier = carrier
        self.window = Window(frame_bytes)
        self.idle_since = time.monotonic()
        self._entries: list[Entry] = []
        """Oldest first."""
        self._lanes_on = [0] * connections
        self._granted = 0

    @property
    def pending_bytes(self) -> int:
        """Asked for by the peer and not yet acknowledged."""
        return sum(entry.outbox.remaining_bytes for entry in self._entries)

    @property
    def pushes(self) -> tuple[int, ...]:
        """What each that is under way has left, least first."""
        return tuple(sorted(entry.outbox.remaining_bytes for entry in self._entries))

    def join(self, entry: Entry) -> None:
        """A push starts."""
        self._entries.append(entry)

    def leave(self, entry: Entry) -> None:
        """A push has ended; its slots are closed."""
        self._entries.remove(entry)
        self.idle_since = time.monotonic()
        self.pump()

    def claim_connection(self) -> int:
        """The connection with the fewest lanes, counted as one more until `yield_connection`."""
        connection = self._lanes_on.index(min(self._lanes_on))
        self._lanes_on[connection] += 1
        return connection

    def yield_connection(self, connection: int) -> None:
        """The claimed lane has ended."""
        self._lanes_on[connection] -= 1

    def pump(self) -> None:
        """Grants turns while the window has room. Called after whatever may have made one possible."""
        now = time.monotonic()
        while ready := [entry for entry in self._entries if entry.ready]:
            entry = ready[0] if len(ready) == 1 else self._choose(ready)
            if not self.window.admits(entry.outbox.next_length, now):
                return
            self._lane(entry, now).grant(now)
            self._granted += 1
        self.window.starved()

    def _choose(self, ready: list[Entry]) -> Entry:
        if self._granted % AGING_EVERY == AGING_EVERY - 1:
            return ready[0]
        return min(ready, key=lambda entry: entry.outbox.remaining_bytes)

    def _lane(self, entry: Entry, now: float) -> "Slot":
        """Behind frames of smaller pushes, if it may be: connections share a link evenly, so that those of a push that
        is on one of four would cross at a quarter of its rate while the other three have something queued.
        """
        left, since = entry.outbox.remaining_bytes, now - self.window.queue_s
        smaller = [other for other in self._entries if other.outbox.remaining_bytes < left]
        queued = {connection for other in smaller for connection, at in other.sent_on.items() if at >= since}
        slot = next((slot for slot in entry.idle if slot.connection in queued), entry.idle[0])
        entry.idle.remove(slot)
        return slot


class Slot:
    """One open lane of one push."""

    def __init__(self, link: Link, entry: Entry, lane: int, connection: int) -> None:
        self.connection = connection
        self._link = link
        self._entry = entry
        self._lane = lane
        self._flights: deque[Flight] = deque()
        self._waiter: asyncio.Future[list[Span]] | None = None
        self._closed = False

    async def next(self) -> list[Span]:
        """Waits for the lane's turn: what to send, at least one span; all are under way from now on."""
        self._waiter = waiter = asyncio.get_running_loop().create_future()
        self._entry.idle.append(self)
        self._link.pump()
        try:
            spans: list[Span] = await waiter
            return spans
        finally:
            self._waiter = None

    def grant(self, now: float) -> None:
        """It is this lane's turn. For the link, which has taken it off the idle ones."""
        window, outbox, published = self._link.window, self._entry.outbox, self._entry.feed.published
        spans: list[Span] = []
        self._entry.sent_on[self.connection] = now
        left = window.turn_bytes
        while not spans or (
            len(spans) < MAX_TURN_FRAMES
            and outbox.has_next(published)
            and outbox.next_length <= left
            and window.admits(outbox.next_length, now)
        ):
            span = outbox.take(self._lane, published)
            self._flights.append(window.sent(span.length, now))
            spans.append(span)
            left -= span.length
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(spans)

    def acked(self, payload_bytes: int) -> bool:
        """The receiver has taken so many bytes on this lane in all; whether that is news."""
        if self._closed or not (covered := self._entry.outbox.acked(self._lane, payload_bytes)):
            return False
        older = sum(self._flights.popleft().size for _ in range(covered - 1))
        self._link.window.acked(self._flights.popleft(), time.monotonic(), older)
        self._link.pump()
        return True

    def close(self) -> None:
        """The lane is over; what was under way on it counts as lost."""
        self._closed = True
        if self in self._entry.idle:
            self._entry.idle.remove(self)
        while self._flights:
            self._link.window.lost(self._flights.popleft())
        self._entry.outbox.lose(self._lane)
        self._link.pump()
