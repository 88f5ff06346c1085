"""Servers that exist only here: one that answers at once, with a prefix cache, and one whose capacity is known."""

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvrelay.load.arrival import Poisson
from kvrelay.load.hostile import Manner
from kvrelay.load.record import Record
from kvrelay.load.run import LoadOptions
from kvrelay.load.target import Reply
from kvrelay.load.workload import Ask

BLOCK = 16


def answer_of(ask: Ask) -> tuple[int, ...]:
    """What every server here answers: a function of prompt and seed."""
    return tuple(32 + (sum(ask.prompt_ids) + ask.seed + index) % 100 for index in range(ask.max_tokens))


@dataclass
class Served:
    """Answers at once; its times are a function of what is asked. Remembers every request."""

    fails: bool = False
    asks: list[Ask] = field(default_factory=list)
    manners: list[Manner] = field(default_factory=list)
    _blocks: set[tuple[int, ...]] = field(default_factory=set)

    async def ask(self, ask: Ask, manner: Manner, timeout_s: float) -> Reply:
        self.asks.append(ask)
        self.manners.append(manner)
        sent_at_s = time.perf_counter()
        await asyncio.sleep(0)
        ids = answer_of(ask)
        record = Record(
            conversation=ask.conversation,
            turn=ask.turn,
            outcome="failed" if self.fails else "ok",
            error="UNAVAILABLE: main" if self.fails else "",
            manner=ask.manner,
            prompt_tokens=len(ask.prompt_ids),
            wanted_tokens=ask.max_tokens,
            output_tokens=len(ids),
            cached_main_tokens=self._hit(ask.prompt_ids),
            arrived_ms=tuple(10.0 + len(ask.prompt_ids) / 10 + 5.0 * index for index in range(len(ids))),
            sources="s" * len(ids),
            e2el_ms=10.0 + 5.0 * len(ids),
            seed=ask.seed,
        )
        self._keep((*ask.prompt_ids, *ids))
        return Reply(record, ids, sent_at_s)

    def _hit(self, prompt: Sequence[int]) -> int:
        for end in range((len(prompt) - 1) // BLOCK * BLOCK, 0, -BLOCK):
            if tuple(prompt[:end]) in self._blocks:
                return end
        return 0

    def _keep(self, ids: Sequence[int]) -> None:
        self._blocks.update(tuple(ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK))


@dataclass(frozen=True)
class ServedTarget:
    """Opens one; picklable, for other processes."""

    fails: bool = False
    breaks: bool = False
    """It cannot even be opened."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Served]:
        if self.breaks:
            raise OSError("no such server")
        yield Served(self.fails)


@dataclass
class Simulated:
    """So many slots, each busy for service_s with a request: it carries slots / service_s requests a second, no more.

    A run on it takes no time: its clock is simulated.
    """

    slots: int
    service_s: float
    rates: list[float] = field(default_factory=list)
    """Of the runs."""
    conversations: list[str] = field(default_factory=list)

    async def run(self, options: LoadOptions) -> list[Record]:
        assert isinstance(options.arrival, Poisson) and options.duration_s is not None
        self.rates.append(options.arrival.rate_per_s)
        due = itertools.takewhile(lambda at_s, end_s=options.duration_s: at_s < end_s, options.arrival.times())  # type: ignore[misc]
        names = itertools.islice(options.workload.conversations(), options.skip, None)
        free = [0.0] * self.slots
        records = []
        for at_s, conversation in zip(due, names, strict=False):
            begins_s = max(at_s, heapq.heappop(free))
            heapq.heappush(free, begins_s + self.service_s)
            wait_ms = (begins_s - at_s) * 1e3
            e2el_ms = wait_ms + self.service_s * 1e3
            ended = at_s + e2el_ms / 1e3 <= options.duration_s + options.grace_s
            self.conversations.append(conversation.name)
            records.append(
                Record(
                    conversation.name, 0, "ok" if ended else "unfinished", due_s=at_s, sent_s=at_s, output_tokens=10,
                    arrived_ms=(wait_ms + 50.0, e2el_ms), e2el_ms=e2el_ms,
                )
            )  # fmt: skip
        return records
