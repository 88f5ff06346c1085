"""Main decode taking in an answer whose client has gone home: a bounded group, and the rule that cuts a push short."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from services.router.tasks import OwnedTasks


def must_cut(remaining_bytes: int, goodput_bytes_per_s: float, singular_cut_s: float) -> bool:
    """The reactive half of the singular rule: the rest would hold the link for longer than it is worth."""
    return remaining_bytes > 0 and remaining_bytes / max(goodput_bytes_per_s, 1.0) > singular_cut_s


class Draining(Protocol):
    """A request whose answer is complete."""

    async def drain(self) -> str:
        """Until nothing is left to do; -> the outcome: drained, cut or lost."""
        ...

    async def aclose(self) -> None:
        """Closes its legs."""
        ...


class DrainGroup:
    """At most `limit` requests, each for at most `drain_s`. `ended` hears every outcome."""

    def __init__(self, limit: int, drain_s: float, ended: Callable[[str], None]) -> None:
        self._limit = limit
        self._drain_s = drain_s
        self._ended = ended
        self._tasks = OwnedTasks()
        self._requests: set[Draining] = set()

    def __len__(self) -> int:
        return len(self._requests)

    def adopt(self, request: Draining) -> bool:
        """Takes over the request and its legs; False: the group is full, and the caller closes them."""
        if len(self._requests) >= self._limit:
            self._ended("full")
            return False
        self._requests.add(request)
        self._tasks.start(self._drain(request), "drain")
        return True

    async def aclose(self) -> None:
        """Cuts all of them."""
        await self._tasks.aclose()
        for request in list(self._requests):  # a task that was cancelled before its first step closed nothing
            await request.aclose()
        self._requests.clear()

    async def _drain(self, request: Draining) -> None:
        outcome = "cancelled"
        try:
            async with asyncio.timeout(self._drain_s):
                outcome = await request.drain()
        except TimeoutError:
            outcome = "deadline"
        finally:
            self._ended(outcome)
            await request.aclose()
            self._requests.discard(request)
