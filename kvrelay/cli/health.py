"""`kvrelay health`: one question to a server's health service, as a container's health check asks it."""

from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from kvrelay.cli.console import err, out, run
from kvrelay.load.client import status_text
from kvrelay.rpc.channels import open_channel


def health(
    address: Annotated[str, typer.Argument(help="host:port of any program of kvrelay.")],
    service: Annotated[str, typer.Argument(help="A service's full name; none: the whole server.")] = "",
    timeout: Annotated[float, typer.Option(help="Seconds.")] = 3.0,
) -> None:
    """Ask a server whether it is ready: exit code 0 if it is SERVING."""
    run(_health(address, service, timeout))


async def _health(address: str, service: str, timeout_s: float) -> int:
    async with open_channel(address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        try:
            reply = await check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            err.print(f"{address}: {status_text(error)}", soft_wrap=True)
            return 1
    out.print(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1
