"""The admin service and the program: what `kvrelay up`, stages and grpcurl use."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvrelay.proto.v1 import wan_pb2, wan_pb2_grpc
from kvrelay.rpc.channels import open_channel
from kvrelay.wan.app import wan_emulator
from kvrelay.wan.settings import WanSettings

# One gRPC poller for the whole session: one that is made and collected with each test may outlive its event loop.
grpc.aio.init_grpc_aio()


@asynccontextmanager
async def admin(settings: WanSettings) -> AsyncIterator[Any]:
    async with wan_emulator(settings) as emulator, open_channel(emulator.admin_address) as channel:
        yield wan_pb2_grpc.WanServiceStub(channel)


async def test_a_target_is_mapped_and_listed() -> None:
    async with admin(WanSettings()) as stub:
        reply = await stub.MapTarget(wan_pb2.MapTargetRequest(target="127.0.0.1:9", target_site="b"))
        assert reply.address.startswith("127.0.0.1:")
        state = await stub.GetLink(wan_pb2.GetLinkRequest())
        assert dict(state.mappings) == {"127.0.0.1:9": reply.address}
        assert (state.connections, state.outage) == (0, wan_pb2.OUTAGE_NONE)
        assert state.cpu_s >= 0 and state.up_s > 0


async def test_setting_the_link_changes_only_what_is_set() -> None:
    async with admin(WanSettings(rate="100mbit", delay_ms=20, delay_ms_b_to_a=30)) as stub:
        change = wan_pb2.SetLinkRequest(a_to_b=wan_pb2.Direction(rate_bytes_per_s=0, jitter_ms=2))
        state = await stub.SetLink(change)
        assert (state.a_to_b.rate_bytes_per_s, state.a_to_b.delay_ms, state.a_to_b.jitter_ms) == (0, 20, 2)
        assert (state.b_to_a.rate_bytes_per_s, state.b_to_a.delay_ms) == (12.5e6, 30)
        state = await stub.SetLink(wan_pb2.SetLinkRequest(outage=wan_pb2.OUTAGE_STALL))
        assert state.outage == wan_pb2.OUTAGE_STALL
        state = await stub.SetLink(wan_pb2.SetLinkRequest(outage=wan_pb2.OUTAGE_NONE))
        assert state.outage == wan_pb2.OUTAGE_NONE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rate_bytes_per_s", -1.0),
        ("rate_bytes_per_s", float("nan")),
        ("delay_ms", float("inf")),
        ("delay_ms", 60_001.0),
        ("jitter_ms", -0.5),
    ],
)
async def test_a_bad_link_is_refused_by_name_and_changes_nothing(field: str, value: float) -> None:
    async with admin(WanSettings(rate="100mbit")) as stub:
        bad = wan_pb2.SetLinkRequest(
            a_to_b=wan_pb2.Direction(rate_bytes_per_s=5), b_to_a=wan_pb2.Direction(**{field: value})
        )
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.SetLink(bad)
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert f"b_to_a.{field}" in (refusal.value.details() or "")
        state = await stub.GetLink(wan_pb2.GetLinkRequest())
        assert state.a_to_b.rate_bytes_per_s == 12.5e6


async def test_a_bad_target_is_invalid_argument() -> None:
    async with admin(WanSettings()) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await stub.MapTarget(wan_pb2.MapTargetRequest(target="x:1", target_site="z"))
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "target_site" in (refusal.value.details() or "")


async def test_the_program_serves_until_it_is_told_to_stop() -> None:
    flags = ["--listen=127.0.0.1:0", "--rate=100mbit", "--delay-ms=5", "--log-level=info"]
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrelay.wan", *flags, stderr=asyncio.subprocess.PIPE
    )
    assert program.stderr is not None
    try:
        async with asyncio.timeout(30.0):
            while b"serving" not in (line := await program.stderr.readline()):
                assert line, "the program ended before it served"
        address = line.decode().split()[-1]
        async with open_channel(address) as channel:
            state = await wan_pb2_grpc.WanServiceStub(channel).GetLink(wan_pb2.GetLinkRequest(), wait_for_ready=True)
        assert (state.a_to_b.rate_bytes_per_s, state.b_to_a.delay_ms) == (12.5e6, 5)
        program.send_signal(signal.SIGTERM)
        await asyncio.wait_for(program.wait(), 10.0)
        assert program.returncode == 0
    finally:
        if program.returncode is None:
            program.kill()
        await program.communicate()
