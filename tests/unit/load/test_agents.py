"""Agents' hit rates follow from their turns: each turn repeats all that was said before it."""

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.load.agents import Agents
from kvrelay.load.arrival import ClosedLoop
from kvrelay.load.lengths import Lengths, Spreading
from kvrelay.load.record import Record
from kvrelay.load.run import LoadOptions, LoadRun
from tests.unit.load.served import BLOCK, Served, ServedTarget

NO_TIME = Spreading(0, 0)


def agents(**changes: object) -> Agents:
    settings: dict[str, object] = {
        "seed": 5,
        "vocab_size": 5000,
        "count": 6,
        "system_tokens": Lengths(64, 64),
        "turns": Lengths(2, 5),
        "think_s": NO_TIME,
    }
    return Agents(**(settings | changes))  # type: ignore[arg-type]


async def ran(workload: Agents, served: Served) -> list[Record]:
    run = LoadRun(LoadOptions(ServedTarget(), workload, ClosedLoop(3), keep_ids=True), served)
    assert await run.warm_up() == []
    await run.measure()
    return run.records


def by_conversation(records: list[Record]) -> list[list[Record]]:
    names = {record.conversation for record in records}
    return [sorted((r for r in records if r.conversation == name), key=lambda r: r.turn) for name in names]


async def test_a_turn_hits_all_that_was_said_before_it_and_no_more() -> None:
    for turns in by_conversation(await ran(agents(), Served())):
        assert len(turns) >= 2
        for before, after in zip(turns, turns[1:], strict=False):
            said = (*before.prompt_ids, *before.ids)
            assert after.prompt_ids[: len(said)] == said
            assert after.cached_main_tokens == len(said) // BLOCK * BLOCK


async def test_a_first_turn_hits_its_kind_s_system_prompt() -> None:
    first = [turns[0] for turns in by_conversation(await ran(agents(), Served()))]
    assert {record.cached_main_tokens for record in first} == {64}


async def test_the_hit_rate_rises_with_the_turns() -> None:
    records = await ran(agents(count=30, turns=Lengths(6, 6)), Served())
    hits = [
        sum(r.cached_main_tokens for r in records if r.turn == turn)
        / sum(r.prompt_tokens for r in records if r.turn == turn)
        for turn in range(6)
    ]
    assert hits == sorted(hits)
    assert hits[0] < 0.4 < 0.75 < hits[-1]


async def test_a_later_turn_waits_for_its_tool() -> None:
    records = await ran(agents(count=2, turns=Lengths(3, 3), think_s=Spreading(0.02, 0.02)), Served())
    for turns in by_conversation(records):
        for before, after in zip(turns, turns[1:], strict=False):
            assert after.due_s - before.sent_s >= 0.02
            assert after.queue_ms == max(0.0, (after.sent_s - after.due_s) * 1e3)


async def test_an_answer_that_fails_ends_its_conversation() -> None:
    records = await ran_failing()
    assert [record.turn for record in records] == [0] * 6


async def ran_failing() -> list[Record]:
    run = LoadRun(LoadOptions(ServedTarget(), agents(), ClosedLoop(3)), Served(fails=True))
    assert await run.warm_up() == ["UNAVAILABLE: main"] * 4
    await run.measure()
    return run.records


@given(seed=st.integers(0, 2**32), kinds=st.integers(1, 6))
def test_every_agent_opens_with_a_warmed_system_prompt_and_thinks_only_between_turns(seed: int, kinds: int) -> None:
    made = agents(seed=seed, kinds=kinds, think_s=Spreading(0.1, 5.0, 1.0))
    systems = {one.opening_ids for one in made.warm_up()}
    conversations = list(made.conversations())
    assert conversations == list(made.conversations())
    for one in conversations:
        assert one.opening_ids in systems
        assert 2 <= len(one.turns) <= 5
        assert one.turns[0].think_s == 0.0
        assert all(0 < turn.think_s <= 5 for turn in one.turns[1:])
