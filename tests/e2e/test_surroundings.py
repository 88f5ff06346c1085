"""Redis and the WAN fail and come back; the cluster serves on as well as it can."""

import asyncio

import pytest

from kvrelay.cli.cluster import Cluster
from kvrelay.proto.v1 import router_pb2, wan_pb2, wan_pb2_grpc
from kvrelay.rpc.channels import open_channel
from tests.e2e.asking import LIMIT_S, check, reference_ids, requests, under_way, whole
from tests.e2e.conftest import Router

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What one engine answers."""
    return reference_ids(requests(""))


async def until_index(router: Router, connected: bool) -> None:
    """The router knows of its index what its last look-ups told it, so it is given some to do."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            await whole(router, requests("look", count=1, tokens=1, prompt=20))
            fleet = await router.fleet()
            if {fleet.index_connected, *(stage.load.index_connected for stage in fleet.stages)} == {connected}:
                return
            await asyncio.sleep(0.1)


async def test_without_redis_requests_are_served_and_the_index_is_back_when_redis_is(
    town: Cluster, router: Router, expected: list[list[int]]
) -> None:
    await town.kill("redis")
    try:
        check(await whole(router, requests("redis down")), expected)
        await until_index(router, False)
    finally:
        await town.restart("redis")
    await until_index(router, True)


def relayed(request: router_pb2.GenerateRequest) -> bool:
    return request.pipeline == router_pb2.PIPELINE_P_RLD_MD


async def set_outage(town: Cluster, outage: wan_pb2.Outage) -> None:
    async with open_channel(town.wan_address) as channel:
        await wan_pb2_grpc.WanServiceStub(channel).SetLink(wan_pb2.SetLinkRequest(outage=outage), timeout=5.0)


async def test_a_stalled_wan_delays_requests_but_changes_no_token(
    town: Cluster, router: Router, expected: list[list[int]]
) -> None:
    asked = requests("stalling")
    async with under_way(router, asked, tokens=10) as flight:
        await flight.grew()
        await set_outage(town, wan_pb2.OUTAGE_STALL)
        try:
            straight_to_main = [task for task, request in zip(flight.tasks, asked, strict=True) if not relayed(request)]
            done, _ = await asyncio.wait(straight_to_main, timeout=1.5)
        finally:
            await set_outage(town, wan_pb2.OUTAGE_NONE)
        assert not done, "main decode cannot be heard; only what relay decode may do by itself goes on"
        answers = await flight.answers()
    assert [answer.error for answer in answers] == [""] * len(answers)
    check(answers, expected)


async def test_a_wan_that_resets_its_connections_ends_no_request_badly(
    town: Cluster, router: Router, expected: list[list[int]]
) -> None:
    async with under_way(router, requests("reset"), tokens=10) as flight:
        await flight.grew()
        await set_outage(town, wan_pb2.OUTAGE_RESET)
        await asyncio.wait(flight.tasks, timeout=1.0)
        await set_outage(town, wan_pb2.OUTAGE_NONE)
        check(await flight.answers(), expected)
    await until_usable(router, "main-1")
    check(await whole(router, requests("mended")), expected)


async def until_usable(router: Router, name: str) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            if any(stage.usable for stage in (await router.fleet()).stages if stage.info.instance_id == name):
                return
            await asyncio.sleep(0.1)
