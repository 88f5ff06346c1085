"""When conversations start. Knows time and chance; nothing of what is said in them.

An open arrival is a list of moments fixed before the run, so a slow answer never delays the next request: what is sent
late is known as such (there is no coordinated omission). A closed loop is the opposite, on purpose.
"""

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvrelay.load.ids import dice
from kvrelay.load.workload import Conversation

Serve = Callable[[Conversation, float], Awaitable[None]]
"""Serves a conversation that is due at a moment (s since the run began)."""


class Schedule(Protocol):
    """An open arrival. Picklable."""

    def times(self) -> Iterator[float]:
        """Moments (s since the run began), not decreasing; as many as are asked for, or fewer, if it ends."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many clients, each starting its next conversation when the last one has ended."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class TraceTimes:
    """Each conversation at its own arrival_s (0 if it has none)."""


@dataclass(frozen=True, slots=True)
class Poisson:
    """Random moments, each independent of the others: `rate_per_s` on average."""

    rate_per_s: float
    seed: int

    def times(self) -> Iterator[float]:
        """See Schedule."""
        return Gamma(self.rate_per_s, self.seed, 1.0).times()


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps by a gamma distribution: `burstiness` is its shape; 1 = Poisson, below 1 in bursts, above 1 more even."""

    rate_per_s: float
    seed: int
    burstiness: float = 1.0

    def times(self) -> Iterator[float]:
        """See Schedule."""
        chance, at_s = dice(self.seed, "arrivals"), 0.0
        while True:
            yield at_s
            at_s += float(chance.gamma(self.burstiness, 1 / (self.rate_per_s * self.burstiness)))


@dataclass(frozen=True, slots=True)
class Constant:
    """Even gaps."""

    rate_per_s: float

    def times(self) -> Iterator[float]:
        """See Schedule."""
        return (number / self.rate_per_s for number in itertools.count())


@dataclass(frozen=True, slots=True)
class Ramp:
    """Poisson whose rate goes evenly from one value to another within ramp_s, then stays there."""

    from_per_s: float
    to_per_s: float
    ramp_s: float
    seed: int

    def times(self) -> Iterator[float]:
        """See Schedule."""
        chance, expected = dice(self.seed, "arrivals"), 0.0
        while True:
            expected += float(chance.exponential())
            yield self._when(expected)

    def _when(self, expected: float) -> float:
        """The moment by which so many arrivals are expected: the integral of the rate, inverted."""
        slope = (self.to_per_s - self.from_per_s) / self.ramp_s
        whole = (self.from_per_s + self.to_per_s) / 2 * self.ramp_s
        if expected >= whole:
            return self.ramp_s + (expected - whole) / self.to_per_s
        root = math.sqrt(self.from_per_s**2 + 2 * slope * expected)
        return 2 * expected / (self.from_per_s + root)


Arrival = ClosedLoop | TraceTimes | Schedule


@dataclass(frozen=True, slots=True)
class Share:
    """The part of an arrival that one of several processes drives: conversations number, number + of, ..."""

    number: int = 0
    of: int = 1


WHOLE = Share()


def plan(
    arrival: Arrival, conversations: Iterable[Conversation], share: Share = WHOLE
) -> Iterator[tuple[float, Conversation]]:
    """(due, conversation) of one share, in order. In a closed loop all are due at 0."""
    if isinstance(arrival, ClosedLoop):
        pairs: Iterable[tuple[float, Conversation]] = ((0.0, one) for one in conversations)
    elif isinstance(arrival, TraceTimes):
        pairs = ((one.arrival_s or 0.0, one) for one in conversations)
    else:
        pairs = zip(arrival.times(), conversations, strict=False)
    return itertools.islice(pairs, share.number, None, share.of)


async def drive(
    arrival: Arrival,
    conversations: Iterable[Conversation],
    serve: Serve,
    *,
    began: float,
    duration_s: float | None = None,
    share: Share = WHOLE,
) -> None:
    """Serves each conversation once, if it is due before duration_s; returns when all have ended.

    `began`: the run's zero on the loop's clock. An error of `serve` ends the rest.
    """
    planned = plan(arrival, conversations, share)
    end_s = math.inf if duration_s is None else duration_s
    if isinstance(arrival, ClosedLoop):
        await _closed(_clients(arrival.concurrency, share), planned, serve, began, end_s)
    else:
        await _open(planned, serve, began, end_s)


def _clients(concurrency: int, share: Share) -> int:
    return len(range(share.number, concurrency, share.of))


async def _closed(
    clients: int, planned: Iterator[tuple[float, Conversation]], serve: Serve, began: float, end_s: float
) -> None:
    loop = asyncio.get_running_loop()

    async def client() -> None:
        while (now_s := max(0.0, loop.time() - began)) < end_s:  # a timer may be up to 1 ms early
            following = next(planned, None)
            if following is None:
                return
            await serve(following[1], now_s)

    await asyncio.sleep(max(0.0, began - loop.time()))
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


async def _open(planned: Iterator[tuple[float, Conversation]], serve: Serve, began: float, end_s: float) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        for due_s, conversation in planned:
            if due_s >= end_s:
                return
            await asyncio.sleep(max(0.0, began + due_s - loop.time()))
            group.create_task(_served(conversation, due_s, serve))


async def _served(conversation: Conversation, due_s: float, serve: Serve) -> None:
    await serve(conversation, due_s)
