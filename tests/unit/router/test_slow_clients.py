"""A client whose own end blocks: no stage waits for it, and nothing is held for it that need not be."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kvrelay.errors import KvrelayError, StageFailed
from kvrelay.proto.v1 import common_pb2, router_pb2
from services.router.pipeline import serve
from tests.unit.router.rig import P_RLD, P_RLD_MD, Rig, legs_of, rig

Write = Callable[[router_pb2.GenerateReply], Awaitable[None]]


def request(max_tokens: int, pipeline: router_pb2.Pipeline = P_RLD_MD) -> router_pb2.GenerateRequest:
    sampling = common_pb2.Sampling(max_tokens=max_tokens, temperature=0, seed=1)
    return router_pb2.GenerateRequest(
        token_ids=router_pb2.TokenIds(ids=range(20)), sampling=sampling, pipeline=pipeline, return_text=False
    )


def blocking(kind: str) -> tuple[Write, asyncio.Event]:
    """A client's end that does not take a reply of this kind until the event is set."""
    gate = asyncio.Event()

    async def write(reply: router_pb2.GenerateReply) -> None:
        if reply.HasField(kind):  # type: ignore[arg-type]
            await gate.wait()

    return write, gate


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(3):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def drains(running: Rig) -> int:
    return len(running.router.rooms.drains)


@pytest.mark.parametrize("leaves", [False, True])
async def test_main_takes_the_answer_in_though_the_client_does_not_take_its_last_message(leaves: bool) -> None:
    async with rig() as running:
        write, gate = blocking("completed")
        served = asyncio.create_task(serve(running.router.rooms, request(3), write))
        p, r, m = await legs_of(running)
        p.first_token(10)
        await r.hears("resume")
        r.tokens(1, 11, 12)
        r.finished(3)
        await until(lambda: drains(running) == 1)
        if leaves:
            served.cancel()
            await asyncio.wait({served})
        m.ready()
        extend = await m.hears("extend")
        assert list(extend.ids) == [10, 11, 12]
        m.drained()
        await until(lambda: drains(running) == 0)
        gate.set()
        await asyncio.wait({served})
        assert served.cancelled() is leaves


async def test_legs_are_closed_at_an_error_though_the_client_does_not_read() -> None:
    async with rig(main=0, rejoin_wait_s=0.05) as running:
        write, gate = blocking("output")
        served = asyncio.create_task(serve(running.router.rooms, request(50, P_RLD), write))
        p, r = await running.p.prefill(), await running.r.leg()
        p.first_token(10)
        await r.hears("resume")
        r.fail(StageFailed("died"))
        await p.gone()
        assert not served.done()
        gate.set()
        with pytest.raises(KvrelayError):
            await served
