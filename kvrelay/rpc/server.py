"""One gRPC server's life: bind, register, serve, and an orderly end. Knows no service of its own but health."""

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from kvrelay.rpc.address import bare_host, split_address
from kvrelay.rpc.channels import BULK_OPTIONS, COMMON_OPTIONS, KEEPALIVE_MS
from kvrelay.rpc.guard import RpcGuard
from kvrelay.rpc.health import ServerHealth

log = logging.getLogger(__name__)

_SERVER_OPTIONS = (
    *COMMON_OPTIONS,
    *BULK_OPTIONS,
    # Clients ping every 5 s, also in a silent prefill; gRPC's own minimum of 300 s would answer with GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 5),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 5),
    ("grpc.http2.max_ping_strikes", 0),
    # Two servers on one port would share its calls silently.
    ("grpc.so_reuseport", 0),
)
_HEALTH = "grpc.health.v1.Health"
_LAST_WORDS_S = 2.0
"""How long cancelled handlers may take to release what they hold."""


class GrpcServer:
    """A server that serves. `address` is host:port as bound (the real port, if 0 was asked for)."""

    def __init__(self, address: str, health: ServerHealth, guard: RpcGuard) -> None:
        self.address = address
        self.health = health
        self._guard = guard

    @property
    def calls(self) -> int:
        """Calls under way, health and reflection included."""
        return len(self._guard.running)


@asynccontextmanager
async def grpc_server(
    listen: str,
    register: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
    *,
    ready: bool = True,
    grace_s: float = 5.0,
) -> AsyncIterator[GrpcServer]:
    """Serve until the body ends; then health says NOT_SERVING, intake stops, running calls get `grace_s`.

    `register` adds the servicers; `services` are their full names, for health and reflection. With `ready` False
    health says NOT_SERVING until `server.health.serving()`.
    OSError: the address cannot be bound (a port in use, say). ValueError: `listen` is not host:port.
    """
    guard = RpcGuard()
    health = ServerHealth(services)
    server = grpc.aio.server(interceptors=[guard], options=_SERVER_OPTIONS)
    register(server)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection([*services, _HEALTH, reflection.SERVICE_NAME], server)
    address = _bind(server, listen)
    if ready:
        await health.serving()
    await server.start()
    log.info("serving %s on %s", ", ".join(services), address)
    try:
        yield GrpcServer(address, health, guard)
    finally:
        await _shut_down(server, health, guard, grace_s)


def _bind(server: grpc.aio.Server, listen: str) -> str:
    host, port = split_address(listen)
    if port and (cause := _why_not(host, port)) is not None:  # asked first: gRPC would complain on stderr by itself
        raise OSError(cause.errno, f"cannot listen on {listen}: {cause.strerror}")
    try:
        bound = server.add_insecure_port(listen)
    except RuntimeError as exc:
        cause = _why_not(host, port) or OSError(errno.EADDRINUSE, "gRPC could not bind it")
        raise OSError(cause.errno, f"cannot listen on {listen}: {cause.strerror}") from exc
    return f"{host}:{bound}"


def _why_not(host: str, port: int) -> OSError | None:
    """Why an address cannot be bound: gRPC says only that it failed, the operating system says why."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((bare_host(host), port), family=family):
            return None
    except OSError as exc:
        return exc


async def _shut_down(server: grpc.aio.Server, health: ServerHealth, guard: RpcGuard, grace_s: float) -> None:
    # 1. Whoever watches health stops sending.
    await health.end()
    # 2. No new calls; gRPC knows best when the last status of the running ones is on the wire.
    stopping = asyncio.create_task(server.stop(grace_s + _LAST_WORDS_S), name="server stop")
    try:
        # 3. Running calls may end.
        await asyncio.wait([stopping], timeout=grace_s)
        # 4. The rest is cancelled.
        if not stopping.done():
            log.warning("cancelling %d calls still running after %.1f s", len(guard.running), grace_s)
    finally:
        await server.stop(None)
        await stopping
    # 5. Cancelled handlers release what they hold.
    try:
        async with asyncio.timeout(_LAST_WORDS_S):
            await guard.idle()
    except TimeoutError:
        log.error("%d calls did not end: %s", len(guard.running), ", ".join(sorted(set(guard.running))))
