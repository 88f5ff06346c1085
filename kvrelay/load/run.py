"""One load run: conversations arrive, are asked turn by turn, and each request leaves a record. Knows no format."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace

from kvrelay.load.arrival import WHOLE, Arrival, ClosedLoop, Share, drive
from kvrelay.load.hostile import Hostility, Manner
from kvrelay.load.record import Record
from kvrelay.load.target import OpenTarget, Reply, Target
from kvrelay.load.workload import Ask, Conversation, Turn, Workload


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Everything that a run is. Picklable."""

    target: Target
    workload: Workload
    arrival: Arrival = ClosedLoop(4)
    warm_caches: bool = True
    """Ask the workload's warm-up first, one by one, unrecorded."""
    warm_up_s: float = 0.0
    """Requests due before are recorded as warm-up and not counted."""
    duration_s: float | None = None
    """No conversation starts after this; None: all start."""
    grace_s: float = 30.0
    """After duration_s, answers may still end for so long; the rest is cut and "unfinished"."""
    timeout_s: float = 300.0
    """Of one request."""
    most_in_flight: int | None = None
    """Open arrivals: more wait here, as queue time."""
    hostility: Hostility = Hostility()
    keep_ids: bool = False
    """Records keep prompt and answer ids, to be compared or used again."""
    skip: int = 0
    """Conversations at the workload's head that an earlier run has had."""
    share: Share = WHOLE
    processes: int = 1
    """`run_load` only: shares the conversations among so many processes."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, told at each request's start and end."""

    sent: int
    ended: int
    record: Record | None = None
    """The request that has just ended; None: one has just been sent."""

    @property
    def running(self) -> int:
        """Requests under way."""
        return self.sent - self.ended


Observer = Callable[[Progress], None]


class LoadRun:
    """Asks an open target; `records` grow as requests end, and `observe` hears of each start and end."""

    def __init__(self, options: LoadOptions, target: OpenTarget, observe: Observer = lambda progress: None) -> None:
        self.records: list[Record] = []
        self.wall_s = 0.0
        self.cpu_share = 0.0
        """Of one core, used by this process during the run."""
        self._options = options
        self._target = target
        self._observe = observe
        self._sent = 0
        self._began_s = 0.0
        most = options.most_in_flight
        self._place: AbstractAsyncContextManager[object] = asyncio.Semaphore(most) if most else nullcontext()

    async def warm_up(self) -> list[str]:
        """Asks the workload's warm-up one by one, unrecorded; the errors, if any."""
        errors = []
        for one in self._options.workload.warm_up():
            turn = one.turns[0]
            ask = Ask(one.name, 0, (*one.opening_ids, *turn.fresh_ids), turn.max_tokens, turn.seed)
            reply = await self._target.ask(ask, Manner(), self._options.timeout_s)
            errors += [reply.record.error] if reply.record.error else []
        return errors

    async def measure(self, begins_at: float | None = None) -> None:
        """Runs them all. begins_at: the run's zero on time.time's clock, so that processes agree; None: now."""
        wait_s = 0.0 if begins_at is None else begins_at - time.time()
        began = asyncio.get_running_loop().time() + wait_s
        self._began_s = time.perf_counter() + wait_s
        cpu_s = time.process_time()
        options = self._options
        await drive(
            options.arrival, self._conversations(), self._serve,
            began=began, duration_s=options.duration_s, share=options.share,
        )  # fmt: skip
        self.wall_s = time.perf_counter() - self._began_s
        self.cpu_share = (time.process_time() - cpu_s) / max(self.wall_s, 1e-9)

    def _conversations(self) -> Iterator[Conversation]:
        return itertools.islice(self._options.workload.conversations(), self._options.skip, None)

    async def _serve(self, conversation: Conversation, due_s: float) -> None:
        history = conversation.opening_ids
        for number, turn in enumerate(conversation.turns):
            if number:
                due_s = self._now_s() + turn.think_s
                if due_s >= self._ends_s():
                    return
                await asyncio.sleep(turn.think_s)
            history += turn.fresh_ids
            ask, manner = self._treated(conversation, number, turn, history, due_s)
            async with self._place:
                reply = await self._asked(ask, manner)
            if not reply.record.ok:
                return
            history += reply.ids

    def _treated(
        self, conversation: Conversation, number: int, turn: Turn, history: tuple[int, ...], due_s: float
    ) -> tuple[Ask, Manner]:
        ask = Ask(conversation.name, number, history, turn.max_tokens, turn.seed, due_s)
        return self._options.hostility.treat(ask)

    async def _asked(self, ask: Ask, manner: Manner) -> Reply:
        self._sent += 1
        self._observe(Progress(self._sent, len(self.records)))
        left_s = self._cut_s() - self._now_s()
        cut = left_s < (float("inf") if manner.leaves_after_s is None else manner.leaves_after_s)
        if cut:  # whatever its client would do, the run ends first
            manner = replace(manner, leaves_after_s=max(left_s, 0.0))
        reply = await self._target.ask(ask, manner, self._options.timeout_s)
        record = self._placed(reply, ask, cut)
        self.records.append(record)
        self._observe(Progress(self._sent, len(self.records), record))
        return replace(reply, record=record)

    def _placed(self, reply: Reply, ask: Ask, cut: bool) -> Record:
        sent_s = reply.sent_at_s - self._began_s
        return replace(
            reply.record,
            outcome="unfinished" if cut and reply.record.outcome == "cancelled" else reply.record.outcome,
            warm_up=ask.due_s < self._options.warm_up_s,
            due_s=ask.due_s,
            sent_s=sent_s,
            queue_ms=max(0.0, (sent_s - ask.due_s) * 1e3),
            prompt_ids=ask.prompt_ids if self._options.keep_ids else (),
            ids=reply.ids if self._options.keep_ids else (),
        )

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    def _ends_s(self) -> float:
        return float("inf") if self._options.duration_s is None else self._options.duration_s

    def _cut_s(self) -> float:
        return self._ends_s() + self._options.grace_s


async def run_load(options: LoadOptions, on_progress: Observer = lambda progress: None) -> list[Record]:
    """Warms up, runs, and returns a record of each request, in order of their ends.

    With `options.processes` > 1, see shards.py. For more than the records, use LoadRun or shards.run_shards.
    """
    if options.processes > 1:
        from kvrelay.load.shards import run_shards

        return (await run_shards(options, on_progress)).records
    async with options.target.open() as target:
        run = LoadRun(options, target, on_progress)
        if options.warm_caches:
            await run.warm_up()
        await run.measure()
    return run.records
