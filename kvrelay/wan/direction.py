"""One direction of the WAN: a rate shared by its flows (deficit round-robin), then a delay line. Knows no sockets.

Times are those of a virtual link: a late event loop changes when bytes are handed on, not the rate at which they pass.
"""

import asyncio
import enum
import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

QUEUE_BYTES = 256 * 1024
"""Of each flow before the delay line, at most."""
LINE_BYTES = 64 * 1024 * 1024
"""Of each flow in the delay line, at most: what a TCP window can hold."""
_HORIZON_S = 0.001
"""Sending is decided so far ahead: event-loop timers are no finer."""
_CREDIT_S = 0.1
"""Bytes that waited in the kernel for room count as having come when there was room, but no earlier than this."""
_PIECE_BYTES = (2 * 1024, 64 * 1024)


class Mark(enum.Enum):
    """What travels in a flow besides bytes, in order with them."""

    EOF = "eof"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class Shape:
    """How a direction behaves."""

    rate: float = 0.0
    """Bytes a second; 0 = unlimited."""
    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Uniform in [0, jitter), added; order within a flow is kept."""
    connection_rate: float = 0.0
    """Bytes a second of each flow; 0 = no cap."""


Item = memoryview | Mark


class Flow:
    """One connection's bytes in one direction. `deliver` gets them at the far end; `roomy` is called when a full queue
    has room again, and says how many bytes wait for it in the kernel.
    """

    def __init__(self, direction: "Direction", deliver: Callable[[Item], None], roomy: Callable[[], int]) -> None:
        self.queue: deque[tuple[float, Item]] = deque()
        """(when it came, bytes or mark)."""
        self.queued = 0
        self.in_line = 0
        """Bytes in the delay line."""
        self.free_at = 0.0
        """When the connection's own cap lets it send again."""
        self.last_due = 0.0
        self.deficit = 0
        self.blocked = False
        """The far end takes nothing more."""
        self.deliver = deliver
        self.roomy = roomy
        self.roomy_at = 0.0
        """When a full queue last had room again, in the link's time ..."""
        self.waiting = 0
        """... and so many of the next bytes had been waiting for that."""
        self._direction = direction

    @property
    def room(self) -> int:
        """Bytes that `put` may bring now."""
        return max(0, QUEUE_BYTES - self.queued)

    def put(self, item: bytes | Mark) -> None:
        """Bytes, or a mark, at the near end."""
        self._direction.put(self, item)

    def block(self, blocked: bool) -> None:
        """Whether the far end takes more."""
        self.blocked = blocked
        if not blocked:
            self._direction.wake(self)

    def close(self) -> None:
        """Nothing more passes."""
        self._direction.drop(self)


class Direction:
    """Shares its rate between the flows that have something to send."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.bytes = 0
        """That have passed the link, since the start."""
        self.busy_s = 0.0
        """Time the link spent on them."""
        self._active: deque[Flow] = deque()
        """Flows with something to send, in turn."""
        self._line: list[tuple[float, int, Flow, Item]] = []
        self._order = itertools.count()
        self._free_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._stalled_at: float | None = None
        self._random = random.Random(1)

    @property
    def backlog_bytes(self) -> int:
        """Waiting before the link."""
        return sum(flow.queued for flow in self._active)

    def flow(self, deliver: Callable[[Item], None], roomy: Callable[[], int]) -> Flow:
        """A new flow."""
        return Flow(self, deliver, roomy)

    def crossing_s(self) -> float:
        """How long a packet without weight takes, drawn anew."""
        return self.shape.delay_s + self._random.random() * self.shape.jitter_s

    def reshape(self, **changes: float) -> None:
        """Changes fields of the shape; bytes in the delay line keep their times."""
        self.shape = replace(self.shape, **changes)
        self._run()

    def stall(self, stalled: bool) -> None:
        """Stops every byte, those in the delay line too, or lets them go on from where they were."""
        now = time.monotonic()
        if stalled and self._stalled_at is None:
            self._stalled_at = now
        elif not stalled and self._stalled_at is not None:
            pause, self._stalled_at = now - self._stalled_at, None
            self._free_at += pause
            self._line = [(due + pause, order, flow, item) for due, order, flow, item in self._line]
            for flow in {id(entry[2]): entry[2] for entry in self._line}.values():
                flow.last_due += pause
            self._run()

    def put(self, flow: Flow, item: bytes | Mark) -> None:
        """For flows."""
        now = time.monotonic()
        came = max(flow.roomy_at, now - _CREDIT_S) if flow.waiting > 0 else now
        if isinstance(item, Mark):
            flow.queue.append((came, item))
        else:
            flow.queue.append((came, memoryview(item)))
            flow.queued += len(item)
            flow.waiting -= len(item)
        self.wake(flow)

    def wake(self, flow: Flow) -> None:
        """For flows: it may have something to send."""
        if flow.queue and not flow.blocked and flow not in self._active:
            flow.deficit = 0
            self._active.append(flow)
        self._run()

    def drop(self, flow: Flow) -> None:
        """For flows: forget it, and what it has under way."""
        flow.queue.clear()
        flow.queued = 0
        if flow in self._active:
            self._active.remove(flow)
        self._line = [entry for entry in self._line if entry[2] is not flow]
        heapq.heapify(self._line)

    def close(self) -> None:
        """Hands nothing on any more."""
        self._active.clear()
        self._line.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        if self._stalled_at is not None:
            return
        now = time.monotonic()
        self._send(now + _HORIZON_S)
        self._hand_on(now + _HORIZON_S / 2)
        self._arm(now)

    def _send(self, until: float) -> None:
        while self._active:
            flow = self._whose_turn()
            start = self._earliest(flow)
            if start > until:
                return
            self._pass(flow, start)

    def _whose_turn(self) -> Flow:
        """The next in turn of those that could send first."""
        if self._earliest(self._active[0]) > self._free_at:
            first = min(range(len(self._active)), key=lambda i: self._earliest(self._active[i]))
            self._active.rotate(-first)
        return self._active[0]

    def _earliest(self, flow: Flow) -> float:
        return max(self._free_at, flow.queue[0][0], flow.free_at)

    def _pass(self, flow: Flow, start: float) -> None:
        """The head of the flow's queue crosses the link, or as much of it as its turn allows."""
        if flow.deficit <= 0:
            flow.deficit += self._piece_bytes()
        came, item = flow.queue.popleft()
        due = start
        if isinstance(item, memoryview):
            if len(item) > flow.deficit:
                flow.queue.appendleft((came, item[flow.deficit :]))
                item = item[: flow.deficit]
            due = self._occupy(flow, start, len(item))
        flow.last_due = due = max(due + self.crossing_s(), flow.last_due)
        heapq.heappush(self._line, (due, next(self._order), flow, item))
        if not flow.queue or flow.blocked or flow.in_line > LINE_BYTES:
            self._active.popleft()
        elif flow.deficit <= 0:
            self._active.rotate(-1)

    def _occupy(self, flow: Flow, start: float, size: int) -> float:
        """Counts `size` bytes of the flow from `start` on; when their last has passed."""
        shape = self.shape
        was_full = flow.room < _PIECE_BYTES[1]
        flow.deficit -= size
        flow.queued -= size
        flow.in_line += size
        self.bytes += size
        self._free_at = start + (size / shape.rate if shape.rate else 0.0)
        self.busy_s += self._free_at - start
        flow.free_at = start + (size / shape.connection_rate if shape.connection_rate else 0.0)
        done = max(self._free_at, flow.free_at)
        if was_full and flow.room >= _PIECE_BYTES[1]:
            flow.roomy_at = done
            flow.waiting = flow.roomy()
        return done

    def _piece_bytes(self) -> int:
        """What a flow may send in its turn: about half a millisecond's worth."""
        least, most = _PIECE_BYTES
        return most if not self.shape.rate else int(min(max(self.shape.rate * 0.0005, least), most))

    def _hand_on(self, until: float) -> None:
        while self._line and self._line[0][0] <= until:
            _, _, flow, item = heapq.heappop(self._line)
            if isinstance(item, memoryview):
                flow.in_line -= len(item)
                if flow.queue and flow not in self._active and not flow.blocked and flow.in_line <= LINE_BYTES:
                    self._active.append(flow)
            flow.deliver(item)

    def _arm(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [self._line[0][0]] if self._line else []
        if self._active:
            times.append(self._earliest(self._whose_turn()) - _HORIZON_S / 2)
        if times:
            wait = max(min(times) - now, 0.0005)
            self._timer = asyncio.get_running_loop().call_later(wait, self._run)
