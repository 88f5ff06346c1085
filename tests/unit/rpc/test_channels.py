"""Channels: each its own connection, quick to find a restarted server, and quiet ones live."""

import asyncio
from typing import Any

import grpc
import pytest

from kvrelay.rpc import channels
from kvrelay.rpc import server as server_module
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


class Wire:
    """A TCP relay that can fall silent without closing, as a broken WAN does."""

    def __init__(self, target: str) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._whole = asyncio.Event()
        self._whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Wire":
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        self._whole.clear()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self._whole.wait()
                sink.write(data)
        finally:
            sink.close()


def hurried(options: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """The same options with keep-alive ten times faster."""
    names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    return tuple((name, value // 10 if name in names else value) for name, value in options)


async def test_a_silent_peer_is_given_up_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_CLIENT_OPTIONS", hurried(channels._CLIENT_OPTIONS))
    monkeypatch.setattr(server_module, "_SERVER_OPTIONS", hurried(server_module._SERVER_OPTIONS))
    async with grpc_server("127.0.0.1:0", register, ["test.Echo"]) as server:
        async with Wire(server.address) as wire, open_channel(wire.address) as channel:
            await channel.unary_unary(PATH)(b"")
            call = channel.unary_unary("/test.Echo/Quiet")(b"60")
            async with asyncio.timeout(5):
                while server.calls == 0:  # noqa: ASYNC110  # the server has no event for it
                    await asyncio.sleep(0.01)
            wire.cut()
            async with asyncio.timeout(5):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
                while server.calls:  # noqa: ASYNC110  # the server has no event for it
                    await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_a_call_that_is_silent_for_many_pings_gets_no_goaway() -> None:
    async with grpc_server("127.0.0.1:0", register, ["test.Echo"]) as server:
        async with open_channel(server.address, Purpose.TOKENS) as channel:
            peer = await channel.unary_unary(PATH)(b"")
            silence_s = KEEPALIVE_MS / 1000 * 5
            assert await channel.unary_unary("/test.Echo/Quiet")(str(silence_s).encode()) == b"still here"
            assert await channel.unary_unary(PATH)(b"") == peer
