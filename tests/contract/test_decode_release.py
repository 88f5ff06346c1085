"""Who frees when the other side never answers: a leg whose client vanishes, in every state, leaves nothing behind."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from kvrelay.proto.v1 import decode_pb2
from kvrelay.types import Role
from tests.pipeline.stages import KvSource, LegCall, kv_source, leg, open_message, prompt, reference, sampling, stage

IDS, HOW = prompt(70), sampling(800)
SLOW = {"pace": "fixed=40", "token_budget": 16}
STATES: dict[str, dict[str, Any]] = {
    "QUEUED": {},
    "ARMED_QUEUED": {},
    "LOADING": {},
    "ARMED": {},
    "LOADED": {"pace": "fixed=200"},
    "PREPARING": SLOW,
    "READY": {},
    "EXTENDING": SLOW,
    "DECODING": {},
    "PAUSED": {},
    "STOPPING": {"pace": "fixed=150"},
    "DRAINING": {},
}


@pytest.fixture
async def source() -> AsyncIterator[KvSource]:
    async with kv_source() as running:
        yield running


async def bring(call: LegCall, state: str, source: KvSource, transfer_id: str) -> None:
    """The leg into `state`, or into it and possibly just beyond where only pace holds it there."""
    if state in ("ARMED_QUEUED", "ARMED"):
        await call.resume(reference(IDS, sampling(1)))
    if state in ("LOADING", "ARMED", "DRAINING"):
        source.feed(call.app, transfer_id, IDS, blocks=2)
    if state == "DRAINING":
        await call.extend(reference(IDS, sampling(3)), final=True)
    if state in ("LOADED", "READY", "EXTENDING"):
        source.feed(call.app, transfer_id, IDS)
    if state in ("READY", "EXTENDING"):
        await call.until("ready")
    if state == "EXTENDING":
        await call.extend(reference(IDS, sampling(40)))
    if state in ("DECODING", "PAUSED", "STOPPING"):
        await call.resume()
        await call.until("tokens")
    if state == "PAUSED":
        await call.until("paused")
    if state == "STOPPING":
        await call.stop()
    await call.in_state(state)


@pytest.mark.parametrize("how", ["cancel", "half-close and cancel"])
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("role", [Role.RELAY, Role.MAIN])
async def test_a_client_that_leaves_in_any_state_leaves_nothing(
    role: Role, state: str, how: str, source: KvSource
) -> None:
    local = state in ("PREPARING", "DECODING", "PAUSED", "STOPPING")
    budget = {"output_budget": 4} if state == "PAUSED" else {}
    async with stage(role, max_running=1, settles=False, **STATES[state]) as app:
        async with leg(app, prompt(20, 1), sampling()) as (first, _):
            if state.endswith("QUEUED"):
                await first.expect("opened")
            else:
                first.cancel()
                await app.settle()
            async with leg(app, IDS, HOW, local_prefill=local, **budget) as (call, transfer_id):
                await bring(call, state, source, transfer_id)
                if how != "cancel":
                    await call.call.done_writing()
                call.cancel()
            first.cancel()
            await app.settle(1.0)
            assert app.core.driver.load().running == 0


async def test_a_channel_that_closes_releases_its_leg(source: KvSource) -> None:
    async with stage(Role.MAIN) as app:
        async with leg(app, IDS, HOW, local_prefill=True) as (call, _):
            await call.resume()
            await call.until("tokens")
        await app.settle(1.0)


_CLIENT = """
import sys, grpc
from kvrelay.proto.v1 import decode_pb2, decode_pb2_grpc
request = decode_pb2.DecodeRequest.FromString(bytes.fromhex(sys.argv[2]))
def messages():
    yield request
    yield decode_pb2.DecodeRequest(resume=decode_pb2.Resume())
    sys.stdin.read()
with grpc.insecure_channel(sys.argv[1]) as channel:
    for event in decode_pb2_grpc.DecodeServiceStub(channel).Decode(messages()):
        print(event.WhichOneof("event"), flush=True)
"""


async def test_a_client_process_that_is_killed_releases_its_leg() -> None:
    async with stage(Role.MAIN, pace="fixed=5") as app:
        message = decode_pb2.DecodeRequest(open=open_message(app, IDS, HOW, local_prefill=True))
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            _CLIENT,
            app.address,
            message.SerializeToString().hex(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert client.stdout is not None
        while await client.stdout.readline() != b"tokens\n":
            pass
        client.kill()
        await app.settle(1.0)
        await client.wait()


async def test_leading_blocks_that_came_before_a_cancel_stay_cached(
    source: KvSource,
) -> None:
    async with stage(Role.MAIN) as app:
        feed = source.compute(IDS)
        async with leg(app, IDS, HOW) as (call, transfer_id):
            await call.expect("opened")
            push = source.push(app, transfer_id, feed, 2)
            progress = await push.progressed(None)
            while progress is not None and progress.payload_bytes_acked < 2 * app.description.layout.block_bytes:
                progress = await push.progressed(progress)
        assert (await push.done()).outcome == "ended"
        await app.settle(1.0)
        async with leg(app, IDS, HOW) as (call, transfer_id):
            assert (await call.expect("opened")).cached_tokens == 32


async def test_a_transfer_that_no_leg_asks_for_is_let_go(source: KvSource) -> None:
    async with stage(Role.MAIN, offer_wait_s=0.1) as app:
        result = await source.feed(app, "nobody", IDS).done()
        assert result.outcome == "ended"


async def test_a_stage_that_stops_cancels_what_still_runs_and_says_how_much(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with contextlib.AsyncExitStack() as client:
        async with stage(Role.MAIN, settles=False, shutdown_grace_s=0.1) as app:
            call, _ = await client.enter_async_context(leg(app, IDS, HOW))
            await call.expect("opened")
        assert "cancelling 1 requests" in caplog.text
        assert app.core.intake.leftovers() == {"leases": 0, "releases": 0}
        assert (await call.refused())[0] is grpc.StatusCode.UNAVAILABLE


async def test_another_legs_transfer_cannot_be_ended_by_a_second_leg_with_its_id(source: KvSource) -> None:
    async with stage(Role.MAIN) as app, leg(app, IDS, HOW) as (call, transfer_id):
        await call.expect("opened")
        async with leg(app, IDS, HOW, transfer_id=transfer_id) as (second, _):
            assert "belongs to another leg" in (await second.refused())[1]
        push = source.feed(app, transfer_id, IDS)
        await call.expect("ready")
        assert (await push.done()).outcome == "committed"
