"""A real router between a real client and scripted stages, one of each role unless told otherwise."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import open_channel
from kvrelay.types import Role
from services.router.app import RouterApp, router_app
from services.router.config import RouterSettings
from tests.fakes_stages import WAIT_S, FakeLeg, FakePrefill, FakeStage, fake_stage

P_RLD_MD, P_MD = router_pb2.PIPELINE_P_RLD_MD, router_pb2.PIPELINE_P_MD
P_RLD, MD = router_pb2.PIPELINE_P_RLD, router_pb2.PIPELINE_MD
ONE_SHOT, CATCH_UP = router_pb2.HANDOFF_MODE_ONE_SHOT, router_pb2.HANDOFF_MODE_CATCH_UP


@dataclass
class Asked:
    """One Generate call; `replies` grows while it is read."""

    call: Any
    replies: list[router_pb2.GenerateReply] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """Output ids so far."""
        return [token for reply in self.replies for token in reply.output.tokens.ids]

    async def until(self, count: int) -> None:
        """Reads until so many output ids are here."""
        async with asyncio.timeout(WAIT_S):
            while len(self.ids) < count:
                self.replies.append(await self._next())
        assert len(self.ids) == count

    async def completed(self) -> router_pb2.Completed:
        """Reads to the end; the last message must be Completed, and the only one."""
        async with asyncio.timeout(WAIT_S):
            async for reply in self.call:
                self.replies.append(reply)
        ends = [reply for reply in self.replies if reply.HasField("completed")]
        assert len(ends) == 1
        assert ends[0] is self.replies[-1]
        usage = ends[0].completed.usage
        assert usage.completion_tokens == len(self.ids)
        assert usage.prefill_tokens + usage.relay_tokens + usage.main_tokens == len(self.ids)
        return ends[0].completed

    async def started(self) -> router_pb2.Started:
        """The first message."""
        self.replies.append(await self._next())
        return self.replies[0].started

    async def _next(self) -> router_pb2.GenerateReply:
        async with asyncio.timeout(WAIT_S):
            async for reply in self.call:
                return reply
        raise AssertionError("the stream has ended")


@dataclass
class Rig:
    """What runs."""

    router: RouterApp
    stub: "router_pb2_grpc.RouterServiceAsyncStub"
    stages: dict[str, FakeStage]

    @property
    def p(self) -> FakeStage:
        return self.stages["p0"]

    @property
    def r(self) -> FakeStage:
        return self.stages["r0"]

    @property
    def m(self) -> FakeStage:
        return self.stages["m0"]

    def ask(
        self,
        prompt: int = 20,
        max_tokens: int = 50,
        pipeline: router_pb2.Pipeline = P_RLD_MD,
        mode: router_pb2.HandoffMode = ONE_SHOT,
        timeout: float = 10.0,
        **more: Any,
    ) -> Asked:
        """Sends a request of so many prompt ids."""
        request = router_pb2.GenerateRequest(
            token_ids=router_pb2.TokenIds(ids=range(prompt)),
            sampling=common_pb2.Sampling(max_tokens=max_tokens, temperature=0, seed=1),
            pipeline=pipeline,
            handoff_mode=mode,
            **more,
        )
        return Asked(self.stub.Generate(request, timeout=timeout))

    async def settled(self) -> None:
        """Nothing is left, here or at any stage."""
        async with asyncio.timeout(2.0):
            while self.router.leftovers() or any(stage.calls for stage in self.stages.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def rig(prefill: int = 1, relay: int = 1, main: int = 1, **settings: Any) -> AsyncIterator[Rig]:
    """Stages p0, r0, m0, ...; on the way out everything must be idle."""
    roles = {"p": (Role.PREFILL, prefill), "r": (Role.RELAY, relay), "m": (Role.MAIN, main)}
    async with AsyncExitStack() as stack:
        stages = {
            f"{kind}{index}": await stack.enter_async_context(fake_stage(role, f"{kind}{index}"))
            for kind, (role, count) in roles.items()
            for index in range(count)
        }
        wanted = {
            "listen": "127.0.0.1:0",
            "model": "tiny",
            "stages": [stage.description.address for stage in stages.values()],
            "redial_min_s": 0.02,
            "redial_max_s": 0.05,
            "shutdown_grace_s": 0.0,
            "local_extend_tokens": 0,
            "turn_wait_s": 0.03,
            **settings,
        }
        router = await stack.enter_async_context(router_app(RouterSettings(**wanted)))
        channel = await stack.enter_async_context(open_channel(router.address))
        async with asyncio.timeout(WAIT_S):
            while sum(not view.why_not for view in router.fleet.views()) < len(stages):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        running = Rig(router, router_pb2_grpc.RouterServiceStub(channel), stages)
        yield running
        await running.settled()


async def legs_of(running: Rig) -> tuple[FakePrefill, FakeLeg, FakeLeg]:
    """The three legs of a relayed request, as the stages see them."""
    return await running.p.prefill(), await running.r.leg(), await running.m.leg()


async def relaying(running: Rig, asked: Asked) -> tuple[FakePrefill, FakeLeg, FakeLeg]:
    """First token 10 from P, then 11 and 12 from the relay."""
    p, r, m = await legs_of(running)
    p.first_token(10)
    resume = await r.hears("resume")
    assert (resume.first_index, list(resume.ids)) == (0, [10])
    r.ready()
    r.tokens(1, 11, 12)
    await asked.until(3)
    return p, r, m
