"""grpc.health.v1 of one server, with a Watch that tells of every change and ends by itself. Knows no other service."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from kvrelay.errors import NotServed

LIVE = "live"
"""Health name that is SERVING as long as the process serves at all; the others say whether it is ready."""

_Status = health_pb2.HealthCheckResponse


class ServerHealth(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """ "" and every service are ready together or not at all; "live" is live until the end.

    grpcio-health-checking's own servicer is not used: its Watch streams outlive its shutdown, and would use up the
    whole grace of the server's.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._ready_names = frozenset(("", *services))
        self._ready = False
        self._ended = False
        self._changed = asyncio.Condition()

    async def serving(self) -> None:
        """Ready: watchers are told."""
        await self._become(True)

    async def not_serving(self) -> None:
        """Alive, but send nothing new: watchers are told."""
        await self._become(False)

    async def end(self) -> None:
        """NOT_SERVING for good, whatever is set later; watchers are told, and their streams end."""
        self._ended = True
        await self._become(False)

    async def _become(self, ready: bool) -> None:
        async with self._changed:
            self._ready = ready
            self._changed.notify_all()

    def _status(self, service: str) -> int | None:
        if service == LIVE:
            return int(_Status.NOT_SERVING if self._ended else _Status.SERVING)
        if service in self._ready_names:
            return int(_Status.SERVING if self._ready and not self._ended else _Status.NOT_SERVING)
        return None

    async def Check(self, request: Any, context: Any) -> Any:
        """Part of grpc.health.v1."""
        status = self._status(request.service)
        if status is None:
            raise NotServed(f"health of {request.service!r}")
        return _Status(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Part of grpc.health.v1."""
        told = None
        while True:
            status, ended = self._shown(request.service), self._ended
            if status != told:
                yield _Status(status=status)
                told = status
            if ended:
                return
            async with self._changed:
                while self._shown(request.service) == told and not self._ended:
                    await self._changed.wait()

    def _shown(self, service: str) -> int:
        status = self._status(service)
        return int(_Status.SERVICE_UNKNOWN) if status is None else status
