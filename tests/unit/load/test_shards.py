"""Several processes do together what one does alone."""

import dataclasses
from typing import Any

import pytest

from kvrelay.load.agents import Agents
from kvrelay.load.arrival import ClosedLoop, Constant
from kvrelay.load.hostile import Hostility
from kvrelay.load.lengths import Lengths, Spreading
from kvrelay.load.record import Record
from kvrelay.load.run import LoadOptions, LoadRun, Progress
from kvrelay.load.shards import ShardFailed, run_shards
from kvrelay.load.summary import summarise
from tests.unit.load.served import Served, ServedTarget

AGENTS = Agents(3, 5000, 12, turns=Lengths(1, 3), think_s=Spreading(0, 0))


def options(**changes: Any) -> LoadOptions:
    made: dict[str, Any] = {
        "target": ServedTarget(), "workload": AGENTS, "arrival": Constant(200.0), "keep_ids": True,
        "hostility": Hostility(probe_rate=0.3),
    }  # fmt: skip
    return LoadOptions(**(made | changes))


def bare(records: list[Record]) -> list[Record]:
    """Without what differs from run to run, in one order: when each was sent, and what a cache had seen by then."""
    flat = [
        dataclasses.replace(record, due_s=0.0, sent_s=0.0, queue_ms=0.0, cached_main_tokens=0) for record in records
    ]
    return sorted(flat, key=lambda record: (record.conversation, record.turn))


async def alone(made: LoadOptions) -> list[Record]:
    run = LoadRun(made, Served())
    await run.measure()
    return run.records


@pytest.mark.parametrize("arrival", [Constant(200.0), ClosedLoop(3)])
async def test_their_records_and_summary_are_those_of_one_process(arrival: Constant | ClosedLoop) -> None:
    made = options(arrival=arrival)
    seen: list[Progress] = []
    parts = await run_shards(dataclasses.replace(made, processes=3), seen.append)
    one = await alone(made)
    assert bare(parts.records) == bare(one)
    assert summarise(bare(parts.records), 10.0) == summarise(bare(one), 10.0)
    assert seen[-1].ended == seen[-1].sent == len(one)
    assert parts.warm_up_errors == []
    assert parts.wall_s > 0


async def test_they_share_one_beginning() -> None:
    parts = await run_shards(options(processes=2, arrival=Constant(1000.0)))
    first_turns = [record for record in parts.records if record.turn == 0]
    assert sorted(record.due_s for record in first_turns) == pytest.approx([n / 1000 for n in range(12)])


async def test_one_that_dies_ends_the_run() -> None:
    with pytest.raises(ExceptionGroup) as failed:
        await run_shards(options(processes=2, target=ServedTarget(breaks=True), warm_caches=False))
    assert failed.group_contains(ShardFailed, match="of 2 of the generator died")


async def test_warm_up_errors_come_back() -> None:
    parts = await run_shards(options(processes=2, target=ServedTarget(fails=True)))
    assert parts.warm_up_errors == ["UNAVAILABLE: main"] * AGENTS.kinds
    assert {record.outcome for record in parts.records} == {"failed"}
