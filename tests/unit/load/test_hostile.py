"""Clients that leave, read slowly or only probe: drawn by seed, and the server sees them go."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.load.arrival import ClosedLoop
from kvrelay.load.client import ask
from kvrelay.load.groups import PrefixGroups
from kvrelay.load.hostile import PATIENT, Hostility, Manner
from kvrelay.load.lengths import Lengths, Spreading
from kvrelay.load.record import Record
from kvrelay.load.run import LoadOptions, LoadRun
from kvrelay.load.target import RouterTarget
from kvrelay.load.workload import Ask
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.unit.cli.load.router import serving
from tests.unit.load.served import Served, ServedTarget

HOSTILE = Hostility(0.2, Spreading(0.1, 0.4), 0.3, 0.05, 0.1)


def asked(seed: int, turn: int = 0) -> Ask:
    return Ask("c", turn, (40, 41), 20, seed)


def test_shares_are_as_asked_for() -> None:
    names = Counter(HOSTILE.treat(asked(seed))[1].name for seed in range(4000))
    for name, share in (("cancel", 0.2), ("slow", 0.3), ("probe", 0.1), ("", 0.4)):
        assert abs(names[name] / 4000 - share) < 0.03


@given(st.integers(0, 2**32), st.integers(0, 9))
def test_equal_requests_meet_equal_manners(seed: int, turn: int) -> None:
    one = asked(seed, turn)
    treated, manner = HOSTILE.treat(one)
    assert (treated, manner) == HOSTILE.treat(one)
    assert treated.manner == manner.name
    assert treated.max_tokens == (1 if manner.name == "probe" else 20)
    assert (manner.leaves_after_s is not None) == (manner.name == "cancel")
    assert manner.leaves_after_s is None or 0.1 <= manner.leaves_after_s <= 0.4
    assert manner.pause_s == (0.05 if manner.name == "slow" else 0.0)


def test_nobody_is_hostile_unless_asked_for() -> None:
    assert Hostility().treat(asked(1)) == (asked(1), PATIENT)


async def test_a_run_treats_its_requests_so_and_counts_them_apart() -> None:
    served = Served()
    workload = PrefixGroups(1, 5000, 200, Lengths(4, 4), Lengths(9, 9))
    run = LoadRun(LoadOptions(ServedTarget(), workload, ClosedLoop(8), hostility=HOSTILE), served)
    await run.measure()
    assert [one.manner for one in served.asks] == [manner.name for manner in served.manners]
    assert {r.output_tokens for r in run.records if r.manner == "probe"} == {1}
    assert {r.output_tokens for r in run.records if r.manner == ""} == {9}
    assert all(r.counted == (r.manner != "slow") for r in run.records)


class Endless(router_pb2_grpc.RouterServiceServicer):
    """Answers with tokens that are there at once, then with silence; knows when its client has left."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.left = asyncio.Event()

    async def Generate(  # type: ignore[override]
        self, request: router_pb2.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[router_pb2.GenerateReply]:
        try:
            yield router_pb2.GenerateReply(started=router_pb2.Started(request_id="r", seed=1, prompt_tokens=2))
            for index in range(self.tokens):
                chunk = common_pb2.TokenChunk(first_index=index, ids=[50], source=common_pb2.SOURCE_RELAY)
                yield router_pb2.GenerateReply(output=router_pb2.Output(tokens=chunk))
            await asyncio.Event().wait()
        finally:
            self.left.set()


@pytest.mark.parametrize("pause_s", [0.0, 30.0])
async def test_a_client_that_leaves_is_seen_to_leave_even_between_two_messages(pause_s: float) -> None:
    router = Endless(3)
    async with serving(router) as address, grpc.aio.insecure_channel(address) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        answer = await ask(stub, router_pb2.GenerateRequest(), timeout_s=30, pause_s=pause_s, leave_after_s=0.3)
        async with asyncio.timeout(5):
            await router.left.wait()
    assert answer.left and not answer.ok and not answer.error
    assert len(answer.ids) <= (0 if pause_s else 3)


async def ran(address: str, **changes: object) -> list[Record]:
    workload = PrefixGroups(1, 5000, 3, Lengths(4, 4), Lengths(9, 9))
    options = LoadOptions(RouterTarget(address), workload, ClosedLoop(3), timeout_s=30, **changes)  # type: ignore[arg-type]
    async with options.target.open() as target:
        run = LoadRun(options, target)
        await run.measure()
    return run.records


async def test_who_leaves_is_cancelled_and_who_is_cut_at_the_end_is_unfinished() -> None:
    async with serving(Endless(3)) as address:
        left = await ran(address, hostility=Hostility(1.0, Spreading(0.1, 0.1)))
        cut = await ran(address, duration_s=0.1, grace_s=0.2)
        both = await ran(address, duration_s=0.1, grace_s=0.2, hostility=Hostility(1.0, Spreading(9.0, 9.0)))
    assert [(record.outcome, record.manner) for record in left] == [("cancelled", "cancel")] * 3
    assert [(record.outcome, record.manner) for record in cut] == [("unfinished", "")] * 3
    assert [(record.outcome, record.manner) for record in both] == [("unfinished", "cancel")] * 3


async def test_a_cancelled_answer_keeps_what_came() -> None:
    async with serving(Endless(3)) as address:
        (record, *_) = await ran(address, hostility=Hostility(1.0, Spreading(0.3, 0.3)), keep_ids=True)
    assert record.ids == (50,) * len(record.arrived_ms)
    assert record.output_tokens == len(record.sources) == len(record.ids)
    assert not record.counted


def test_manners_are_patient_by_default() -> None:
    assert Manner() == PATIENT
