"""A run's records say when each request was due and when it was sent: its own delay is in none of the other times."""

import asyncio
import dataclasses
from typing import Any

from kvrelay.load.arrival import ClosedLoop, Constant
from kvrelay.load.groups import PrefixGroups
from kvrelay.load.hostile import Manner
from kvrelay.load.lengths import Lengths
from kvrelay.load.record import Record
from kvrelay.load.run import LoadOptions, LoadRun, Progress, run_load
from kvrelay.load.target import Reply
from kvrelay.load.workload import Ask
from tests.unit.load.served import Served, ServedTarget

SOME = PrefixGroups(1, 5000, 12, Lengths(4, 8), Lengths(2, 2), 2, Lengths(16, 16))


class Slow(Served):
    """Each answer takes a while; knows how many were under way at once."""

    def __init__(self, takes_s: float = 0.02) -> None:
        super().__init__()
        self.takes_s = takes_s
        self.now = self.most = 0

    async def ask(self, ask: Ask, manner: Manner, timeout_s: float) -> Reply:
        self.now += 1
        self.most = max(self.most, self.now)
        reply = await super().ask(ask, manner, timeout_s)
        await asyncio.sleep(self.takes_s)
        self.now -= 1
        return reply


async def ran(served: Served, **changes: Any) -> list[Record]:
    run = LoadRun(LoadOptions(ServedTarget(), SOME, **changes), served)
    await run.measure()
    return run.records


async def test_requests_beyond_the_most_in_flight_queue_here_and_their_wait_is_told_apart() -> None:
    slow = Slow()
    records = await ran(slow, arrival=Constant(1000.0), most_in_flight=2)
    assert slow.most == 2
    assert sorted(record.due_s for record in records) == [n / 1000 for n in range(12)]
    last = max(records, key=lambda record: record.sent_s)
    assert last.queue_ms >= 60  # five answers of 20 ms came before it, and timers may be 1 ms early
    assert last.e2el_ms == 20.0


async def test_without_a_limit_none_waits_for_another_s_answer() -> None:
    slow = Slow(0.1)
    await ran(slow, arrival=Constant(1000.0))
    assert slow.most > 2


async def test_requests_due_within_the_warm_up_are_marked() -> None:
    records = await ran(Served(), arrival=Constant(100.0), warm_up_s=0.045)
    assert [record.warm_up for record in sorted(records, key=lambda r: r.due_s)] == [True] * 5 + [False] * 7


async def test_each_request_is_told_when_sent_and_when_ended() -> None:
    seen: list[Progress] = []
    records = await run_load(LoadOptions(ServedTarget(), SOME, ClosedLoop(3)), seen.append)
    assert len(seen) == 24
    assert [progress.record for progress in seen if progress.record] == records
    assert max(progress.running for progress in seen) == 3
    assert seen[-1].running == 0


async def test_a_run_may_begin_behind_what_an_earlier_one_asked() -> None:
    options = LoadOptions(ServedTarget(), SOME, ClosedLoop(1))
    whole = [record.conversation for record in await run_load(options)]
    rest = [record.conversation for record in await run_load(dataclasses.replace(options, skip=5))]
    assert rest == whole[5:]


async def test_the_warm_up_asks_each_prefix_once_and_leaves_no_record() -> None:
    served = Served()
    run = LoadRun(LoadOptions(ServedTarget(), SOME), served)
    assert await run.warm_up() == []
    assert [ask.conversation for ask in served.asks] == ["group-0", "group-1"]
    assert run.records == []


async def test_ids_are_kept_only_if_asked_for() -> None:
    assert {record.prompt_ids for record in await ran(Served())} == {()}
    kept = await ran(Served(), keep_ids=True)
    assert all(len(record.prompt_ids) == record.prompt_tokens and len(record.ids) == 2 for record in kept)
