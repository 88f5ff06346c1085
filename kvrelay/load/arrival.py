"""When conversations start. Knows time and chance; nothing of what is said in them."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from kvrelay.load.workload import Conversation

Serve = Callable[[Conversation], Awaitable[None]]


class Arrival(Protocol):
    """A way to start conversations."""

    async def drive(self, conversations: Iterable[Conversation], serve: Serve) -> None:
        """Serves each of them once; returns when all have ended. An error of `serve` ends the rest."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many clients, each starting its next conversation when the last one has ended."""

    concurrency: int

    async def drive(self, conversations: Iterable[Conversation], serve: Serve) -> None:
        """See Arrival."""
        waiting = iter(conversations)
        async with asyncio.TaskGroup() as clients:
            for _ in range(self.concurrency):
                clients.create_task(self._client(waiting, serve))

    async def _client(self, waiting: Iterator[Conversation], serve: Serve) -> None:
        for conversation in waiting:
            await serve(conversation)


@dataclass(frozen=True, slots=True)
class Poisson:
    """Starts at random moments, independent of how the last ones fare: `rate_per_s` on average."""

    rate_per_s: float
    seed: int

    async def drive(self, conversations: Iterable[Conversation], serve: Serve) -> None:
        """See Arrival."""
        dice = random.Random(f"{self.seed} arrivals")
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as open_ones:
            for conversation in conversations:
                await asyncio.sleep(max(0.0, due - loop.time()))
                open_ones.create_task(self._serve(conversation, serve))
                due += dice.expovariate(self.rate_per_s)

    async def _serve(self, conversation: Conversation, serve: Serve) -> None:
        await serve(conversation)
