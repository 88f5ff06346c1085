"""Questions to a starting cluster: does it serve, can the router use it. Knows health, fleet, WAN admin; no process.

None of them has a limit of its own: the asker sets one.
"""

import asyncio
import contextlib
from collections.abc import Mapping

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from kvrelay.index.store import connect
from kvrelay.proto.v1 import router_pb2, router_pb2_grpc, stage_pb2, stage_pb2_grpc, wan_pb2, wan_pb2_grpc
from kvrelay.rpc.channels import open_channel

POLL_S = 0.1
ANSWER_S = 1.0


async def serving(address: str, name: str = "") -> None:
    """Returns once the health service at `address` says SERVING for `name`; empty: the server is ready."""
    async with open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for reply in stub.Watch(health_pb2.HealthCheckRequest(service=name), wait_for_ready=True):
                    if reply.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            await asyncio.sleep(POLL_S)


async def redis_answers(address: str) -> None:
    """Returns once the Redis at `address` answers PING."""
    while True:
        with contextlib.suppress(redis.RedisError, OSError):
            async with asyncio.timeout(ANSWER_S), connect(f"redis://{address}/0", timeout_s=ANSWER_S) as client:
                await client.ping()
                return
        await asyncio.sleep(POLL_S)


async def epoch_of(address: str) -> int:
    """The epoch of the stage that serves at `address`."""
    async with open_channel(address) as channel:
        stub = stage_pb2_grpc.StageServiceStub(channel)
        return (await stub.Describe(stage_pb2.DescribeRequest(), wait_for_ready=True)).epoch


async def usable(router: str, stages: Mapping[str, int]) -> None:
    """Returns once the router can use each stage: instance id -> epoch of the incarnation that is meant."""
    async with open_channel(router) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                fleet = await stub.GetFleet(router_pb2.GetFleetRequest(), wait_for_ready=True)
                known = {(stage.info.instance_id, stage.info.epoch) for stage in fleet.stages if stage.usable}
                if known >= set(stages.items()):
                    return
            await asyncio.sleep(POLL_S)


async def mapped(wan: str, target: str, site: str) -> str:
    """host:port on the WAN emulator that leads to `target` at `site`."""
    async with open_channel(wan) as channel:
        request = wan_pb2.MapTargetRequest(target=target, target_site=site)
        return (await wan_pb2_grpc.WanServiceStub(channel).MapTarget(request, wait_for_ready=True)).address
