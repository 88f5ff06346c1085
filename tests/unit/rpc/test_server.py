"""The server's life and what clients see of its errors, over real sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from google.protobuf.wrappers_pb2 import StringValue
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvrelay import errors
from kvrelay.proto.v1 import router_pb2_grpc, stage_pb2, stage_pb2_grpc
from kvrelay.rpc.channels import MESSAGE_LIMIT_BYTES, Purpose, open_channel
from kvrelay.rpc.server import GrpcServer, grpc_server
from kvrelay.rpc.status import from_rpc_error

SERVICE = "test.Service"


class Script:
    """A service of all four kinds that does what the request's text names."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.entered = asyncio.Event()

    async def act(self, text: str) -> None:
        self.entered.set()
        if text == "invalid":
            raise errors.InvalidRequest("sampling.top_p", "must be in (0, 1], got 7.0")
        if text == "bug":
            raise KeyError("secret")
        if text == "group":
            async with asyncio.TaskGroup():
                raise errors.StageFailed("prefill p1: gone")
        if text == "mixed":
            raise ExceptionGroup("", [errors.StageFailed("p1"), KeyError("secret")])
        if text == "hang":
            await asyncio.get_running_loop().create_future()

    async def unary(self, request: Any, context: Any) -> Any:
        try:
            await self.act(request.value)
            return request
        finally:
            self.ended.set()

    async def server_stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            yield request
            await self.act(request.value)
            while request.value == "endless":
                yield request
        finally:
            self.ended.set()

    async def server_stream_by_write(self, request: Any, context: Any) -> None:
        await context.write(request)
        await self.act(request.value)

    async def client_stream(self, requests: Any, context: Any) -> Any:
        async for request in requests:
            await self.act(request.value)
        return Empty()

    async def both(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            await self.act(request.value)
            yield request

    def register(self, server: grpc.aio.Server) -> None:
        codec = {"request_deserializer": StringValue.FromString, "response_serializer": lambda m: m.SerializeToString()}
        handlers = {
            "Unary": grpc.unary_unary_rpc_method_handler(self.unary, **codec),
            "ServerStream": grpc.unary_stream_rpc_method_handler(self.server_stream, **codec),
            "ServerStreamByWrite": grpc.unary_stream_rpc_method_handler(self.server_stream_by_write, **codec),
            "ClientStream": grpc.stream_unary_rpc_method_handler(self.client_stream, **codec),
            "Both": grpc.stream_stream_rpc_method_handler(self.both, **codec),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


KINDS = ["Unary", "ServerStream", "ServerStreamByWrite", "ClientStream", "Both"]


def start(channel: grpc.aio.Channel, kind: str, raw: bytes, *, timeout: float = 10) -> Any:
    async def requests() -> AsyncIterator[bytes]:
        yield raw

    path = f"/{SERVICE}/{kind}"
    if kind == "Unary":
        return channel.unary_unary(path)(raw, timeout=timeout)
    if kind == "ClientStream":
        return channel.stream_unary(path)(requests(), timeout=timeout)
    if kind == "Both":
        return channel.stream_stream(path)(requests(), timeout=timeout)
    return channel.unary_stream(path)(raw, timeout=timeout)


async def call(channel: grpc.aio.Channel, kind: str, raw: bytes) -> list[bytes]:
    started = start(channel, kind, raw)
    if kind in ("Unary", "ClientStream"):
        return [await started]
    return [message async for message in started]


async def failure(channel: grpc.aio.Channel, kind: str, raw: bytes) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, kind, raw)
    return caught.value


def said(text: str) -> bytes:
    return StringValue(value=text).SerializeToString()


@pytest.fixture
async def script() -> Script:
    return Script()


@pytest.fixture
async def server(script: Script) -> AsyncIterator[GrpcServer]:
    async with grpc_server("127.0.0.1:0", script.register, [SERVICE], grace_s=0.2) as server:
        yield server


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(server.address, Purpose.CONTROL) as channel:
        yield channel


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_of_handler_answers(channel: grpc.aio.Channel, server: GrpcServer, kind: str) -> None:
    assert await call(channel, kind, said("fine")) in ([said("fine")], [b""])
    assert server.calls == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_domain_error_arrives_as_what_it_was(channel: grpc.aio.Channel, kind: str) -> None:
    error = await failure(channel, kind, said("invalid"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "sampling.top_p: must be in (0, 1], got 7.0"
    back = from_rpc_error(error, "router")
    assert isinstance(back, errors.InvalidRequest)
    assert back.field == "sampling.top_p"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_unknown_error_tells_the_client_nothing_and_the_log_all(
    channel: grpc.aio.Channel, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    error = await failure(channel, kind, said("bug"))
    assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "internal error")
    [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError
    assert kind in record.getMessage()


async def test_a_task_group_of_domain_errors_counts_as_its_first(channel: grpc.aio.Channel) -> None:
    error = await failure(channel, "Unary", said("group"))
    assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "prefill p1: gone")


async def test_a_bug_beside_a_domain_error_is_not_hidden(channel: grpc.aio.Channel) -> None:
    assert (await failure(channel, "Unary", said("mixed"))).code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("raw", [b"\x0a\x02\xff\xfe", b"\x0a\x7f", b"\xff\xff\xff"], ids=["not utf-8", "short", "junk"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_malformed_request_is_an_invalid_argument(channel: grpc.aio.Channel, kind: str, raw: bytes) -> None:
    error = await failure(channel, kind, raw)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"/{SERVICE}/{kind}" in (error.details() or "")
    assert await call(channel, kind, said("fine"))


async def test_an_oversize_message_is_resource_exhausted_and_harms_no_other(
    channel: grpc.aio.Channel, server: GrpcServer
) -> None:
    too_large = said("x" * (MESSAGE_LIMIT_BYTES + 1))
    async with grpc.aio.insecure_channel(server.address) as careless:
        for sender in (channel, careless):
            error = await failure(sender, "Unary", too_large)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert isinstance(from_rpc_error(error, "router"), errors.InvalidRequest)
    assert await call(channel, "Unary", said("x" * (4 * 1024 * 1024)))


async def test_a_generator_is_closed_when_its_client_leaves_between_two_messages(
    channel: grpc.aio.Channel, script: Script, server: GrpcServer
) -> None:
    stream = start(channel, "ServerStream", said("endless"))
    assert await stream.read() == said("endless")
    stream.cancel()
    async with asyncio.timeout(5):
        await script.ended.wait()


@pytest.mark.parametrize("kind", ["Unary", "ServerStream"])
async def test_cancelling_a_silent_call_cancels_its_handler(
    channel: grpc.aio.Channel, script: Script, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    started = start(channel, kind, said("hang"))
    pending = asyncio.ensure_future(started.read()) if kind == "ServerStream" else None
    await script.entered.wait()
    started.cancel()
    async with asyncio.timeout(5):
        await script.ended.wait()
    if pending is not None:
        await asyncio.gather(pending, return_exceptions=True)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_shutdown_lets_calls_end_within_the_grace_then_cancels_the_rest_and_says_how_many(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc_server("127.0.0.1:0", script.register, [SERVICE], grace_s=0.1) as server:
        channel = open_channel(server.address)
        hanging = start(channel, "Unary", said("hang"))
        waiter = asyncio.ensure_future(failure_of(hanging))
        await script.entered.wait()
    assert script.ended.is_set()
    assert (await waiter).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    assert "cancelling 1 calls still running after 0.1 s" in caplog.text
    await channel.close()


async def failure_of(started: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await started
    return caught.value


async def test_a_health_watcher_is_told_before_the_end_and_costs_no_grace(script: Script) -> None:
    statuses: list[int] = []
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        async with grpc_server("127.0.0.1:0", script.register, [SERVICE], ready=False, grace_s=30) as server:
            channel = open_channel(server.address)
            health = health_pb2_grpc.HealthStub(channel)
            first = asyncio.Event()

            async def watch() -> None:
                async for reply in health.Watch(health_pb2.HealthCheckRequest(service=SERVICE)):
                    statuses.append(reply.status)
                    first.set()

            group.create_task(watch())
            await first.wait()
            live = await health.Check(health_pb2.HealthCheckRequest(service="live"))
            assert live.status == health_pb2.HealthCheckResponse.SERVING
            first.clear()
            await server.health.serving()
            await first.wait()
            began = loop.time()
        assert loop.time() - began < 5
    not_serving, serving = health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING
    assert statuses == [not_serving, serving, not_serving]
    await channel.close()


async def test_health_of_an_unknown_service_is_not_found(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_and_describes_the_services() -> None:
    name = "kvrelay.proto.v1.RouterService"

    def register(server: grpc.aio.Server) -> None:
        router_pb2_grpc.add_RouterServiceServicer_to_server(router_pb2_grpc.RouterServiceServicer(), server)

    async with grpc_server("127.0.0.1:0", register, [name]) as server, open_channel(server.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        async def ask() -> AsyncIterator[Any]:
            yield reflection_pb2.ServerReflectionRequest(list_services="")
            yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)

        listed, described = [reply async for reply in stub.ServerReflectionInfo(ask())]
        names = {service.name for service in listed.list_services_response.service}
        assert {name, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names
        assert described.file_descriptor_response.file_descriptor_proto


async def test_a_port_in_use_is_an_oserror_that_names_the_address(server: GrpcServer, script: Script) -> None:
    with pytest.raises(OSError, match=f"cannot listen on {server.address}: .*in use"):
        async with grpc_server(server.address, script.register, [SERVICE]):
            pass


@pytest.mark.parametrize("listen", ["nonsense", "host:", ":1", "host:70000", "host:-1"])
async def test_a_listen_text_that_is_no_address_is_refused(listen: str, script: Script) -> None:
    with pytest.raises(ValueError, match="listen: must be host:port"):
        async with grpc_server(listen, script.register, [SERVICE]):
            pass


async def test_servers_start_and_end_many_times_in_one_loop(script: Script) -> None:
    for _ in range(5):
        async with grpc_server("127.0.0.1:0", script.register, [SERVICE]) as server:
            async with open_channel(server.address, Purpose.KV) as channel:
                await call(channel, "Both", said("fine"))


async def test_an_unimplemented_method_is_unsupported(channel: grpc.aio.Channel) -> None:
    stub = stage_pb2_grpc.StageServiceStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Describe(stage_pb2.DescribeRequest())
    assert isinstance(from_rpc_error(caught.value, "stage x"), errors.Unsupported)


async def test_a_call_that_ends_just_as_the_server_does_is_complete(script: Script) -> None:
    for _ in range(30):
        serving = AsyncExitStack()
        server = await serving.enter_async_context(grpc_server("127.0.0.1:0", script.register, [SERVICE]))
        async with open_channel(server.address) as channel:
            stream = start(channel, "ServerStream", said("fine"))
            assert await stream.read() == said("fine")
            async with asyncio.TaskGroup() as group:
                rest = group.create_task(stream.read())
                group.create_task(serving.aclose())
            assert rest.result() is grpc.aio.EOF
