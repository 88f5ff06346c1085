"""Stages join and leave at run time, each alone; who disagrees is refused and shown."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import grpc
import pytest

from kvrelay.errors import StageFailed
from kvrelay.proto.v1 import router_pb2
from kvrelay.types import Role
from services.router.discovery import resolve
from services.router.fleet import Fleet
from tests.fakes_stages import LAYOUT, fake_stage
from tests.unit.router.rig import P_MD, rig


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def usable(fleet: Fleet) -> set[tuple[str, int]]:
    return {view.incarnation for view in fleet.views() if not view.why_not}


def why_not(fleet: Fleet, name: str) -> str:
    return next((view.why_not for view in fleet.views() if view.instance_id == name), "unknown")


async def test_a_stage_leaves_and_comes_back_at_the_same_address_with_a_new_epoch() -> None:
    async with rig() as running, AsyncExitStack() as own:
        fleet = running.router.fleet
        late = await own.enter_async_context(AsyncExitStack())
        stage = await late.enter_async_context(fake_stage(Role.MAIN, "m9"))
        address = stage.description.address
        fleet.add(address)
        await until(lambda: ("m9", 1) in usable(fleet))
        first = next(one for one in fleet.live() if one.instance_id == "m9")
        assert fleet.live() is fleet.live()
        assert fleet.link(first).address == address
        await late.aclose()
        await until(lambda: ("m9", 1) not in usable(fleet))
        assert why_not(fleet, "m9")
        assert first not in fleet.live()
        with pytest.raises(StageFailed, match="m9 .epoch 1. has left"):
            fleet.link(first)
        forgotten: list[str] = []
        fleet.on_restart(forgotten.append)
        await own.enter_async_context(fake_stage(Role.MAIN, "m9", listen=address, epoch=2))
        await until(lambda: ("m9", 2) in usable(fleet))
        assert forgotten == ["m9"]


async def test_a_stage_with_another_layout_is_refused_and_shown_with_both_values() -> None:
    other = LAYOUT.__class__("w", 2, 2, 8, 32, "float64", "default")
    async with rig() as running, fake_stage(Role.MAIN, "odd", layout=other) as stage:
        running.router.fleet.add(stage.description.address)
        await until(lambda: "refused" in why_not(running.router.fleet, "odd"))
        fleet = await running.stub.GetFleet(router_pb2.GetFleetRequest())
        shown = next(one for one in fleet.stages if one.info.instance_id == "odd")
        assert not shown.usable
        assert "block_tokens: 16 here, 32 there" in shown.why_not


async def test_two_stages_of_one_name_do_not_hide_each_other() -> None:
    async with rig() as running, fake_stage(Role.MAIN, "m0", epoch=7) as twin:
        fleet = running.router.fleet
        fleet.add(twin.description.address)
        await asyncio.sleep(0.1)
        assert ("m0", 1) in usable(fleet)
        assert ("m0", 7) not in usable(fleet)


async def test_a_draining_stage_is_not_chosen() -> None:
    async with rig(main=2) as running:
        running.stages["m0"].report(draining=True)
        await until(lambda: why_not(running.router.fleet, "m0") == "draining")
        for _ in range(3):
            plan = await running.stub.Plan(
                router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=range(100)), pipeline=P_MD)
            )
            assert plan.route.main == "m1"


async def test_a_silent_stage_is_not_chosen() -> None:
    async with rig(load_silence_s=2) as running:
        running.r.report()
        await until(lambda: "silent for" in why_not(running.router.fleet, "m0"))


async def test_health_is_ready_only_while_every_leg_has_a_stage() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

    from kvrelay.rpc.channels import open_channel

    serving = health_pb2.HealthCheckResponse.SERVING
    async with rig() as running, open_channel(running.router.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        seen: list[int] = []

        async def watch() -> None:
            async for reply in stub.Watch(health_pb2.HealthCheckRequest()):
                seen.append(reply.status)

        task = asyncio.ensure_future(watch())
        await until(lambda: bool(seen) and seen[-1] == serving)
        running.m.leave()
        await until(lambda: seen[-1] != serving)
        await until(lambda: seen[-1] == serving)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_health_is_not_ready_while_the_only_main_stage_is_draining() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from kvrelay.rpc.channels import open_channel

    async with rig() as running, open_channel(running.router.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def serves(wanted: bool) -> None:
            async with asyncio.timeout(5):
                async for reply in stub.Watch(health_pb2.HealthCheckRequest()):
                    if (reply.status == health_pb2.HealthCheckResponse.SERVING) is wanted:
                        return

        await serves(True)
        running.m.report(draining=True)
        await serves(False)
        running.m.report(draining=False)
        await serves(True)


async def test_the_fleet_shows_addresses_that_were_never_reached() -> None:
    async with rig() as running:
        running.router.fleet.add("127.0.0.1:1")
        await until(lambda: "not reached" in running.router.fleet.unreached().get("127.0.0.1:1", ""))
        shown = await running.stub.GetFleet(router_pb2.GetFleetRequest())
        assert [one.info.address for one in shown.stages if not one.usable] == ["127.0.0.1:1"]
        assert shown.policy == "pdd"
        running.router.fleet.drop_missing(set())
        assert running.router.fleet.unreached() == {}
        assert len(usable(running.router.fleet)) == 3


async def test_names_are_resolved_to_every_address_and_a_literal_stays() -> None:
    assert await resolve("127.0.0.1:7") == ["127.0.0.1:7"]
    assert "127.0.0.1:7" in await resolve("localhost:7")
    assert await resolve("no-such-host.invalid:7") == []
    with pytest.raises(ValueError, match="stages"):
        await resolve("nonsense")


async def test_without_any_stage_a_request_is_unavailable_at_once() -> None:
    async with rig(prefill=0, relay=0, main=0) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.ask().completed()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "no stage is registered" in str(caught.value.details())
