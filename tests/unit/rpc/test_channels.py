"""Channels: each its own connection, quick to find a restarted server, and quiet ones live."""

import asyncio
from typing import Any

import grpc
import pytest

from kvrelay.rpc.channels import KEEPALIVE_MS, Purpose, open_channel
from kvrelay.rpc.server import grpc_server

PATH = "/test.Echo/Peer"


def register(server: grpc.aio.Server) -> None:
    async def peer(request: bytes, context: Any) -> bytes:
        return context.peer().encode()

    async def quiet(request: bytes, context: Any) -> bytes:
        await asyncio.sleep(float(request))
        return b"still here"

    handlers = {
        "Peer": grpc.unary_unary_rpc_method_handler(peer),
        "Quiet": grpc.unary_unary_rpc_method_handler(quiet),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))


@pytest.mark.parametrize("purpose", Purpose)
async def test_two_channels_to_one_address_never_share_a_connection(purpose: Purpose) -> None:
    async with grpc_server("127.0.0.1:0", register, ["test.Echo"]) as server:
        async with open_channel(server.address, purpose) as one, open_channel(server.address, purpose) as two:
            peers = [await channel.unary_unary(PATH)(b"") for channel in (one, two, one)]
    assert peers[0] == peers[2] != peers[1]


async def test_a_server_that_comes_back_on_its_address_is_found_within_two_seconds() -> None:
    async with grpc_server("127.0.0.1:0", register, ["test.Echo"]) as first:
        channel = open_channel(first.address)
        await channel.unary_unary(PATH)(b"")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(PATH)(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    async with grpc_server(first.address, register, ["test.Echo"]):
        await channel.unary_unary(PATH)(b"", timeout=2, wait_for_ready=True)
        await channel.close()


async def test_the_proxy_of_the_environment_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    async with grpc_server("127.0.0.1:0", register, ["test.Echo"]) as server:
        async with open_channel(server.address) as channel:
            assert await channel.unary_unary(PATH)(b"", timeout=5)


def test_a_text_that_is_no_address_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="address: must be host:port"):
        open_channel("nowhere")


@pytest.mark.slow
async def test_a_call_that_is_silent_for_many_pings_gets_no_goaway() -> None:
    async with grpc_server("127.0.0.1:0", register, ["test.Echo"]) as server:
        async with open_channel(server.address, Purpose.TOKENS) as channel:
            peer = await channel.unary_unary(PATH)(b"")
            silence_s = KEEPALIVE_MS / 1000 * 5
            assert await channel.unary_unary("/test.Echo/Quiet")(str(silence_s).encode()) == b"still here"
            assert await channel.unary_unary(PATH)(b"") == peer
