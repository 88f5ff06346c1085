"""The address that a stage tells others to dial. Opens one call at most."""

import socket

import grpc

from kvrelay.errors import StageFailed
from kvrelay.proto.v1 import wan_pb2, wan_pb2_grpc
from kvrelay.rpc.channels import open_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.settings import StageSettings

_PATIENCE_S = 10.0
_WILDCARDS = ("0.0.0.0", "[::]", "::")


async def advertised_address(settings: StageSettings, bound: str) -> str:
    """`advertise`, or the bound address; with `advertise_via` the emulator's port that leads to it.

    StageFailed: the emulator cannot be asked.
    """
    return await _reached(settings, settings.advertise or _dialable(bound))


async def advertised_bulk_address(settings: StageSettings, bound: str) -> str:
    """`bulk_advertise`, or where bulk connections are bound; through the emulator likewise. StageFailed likewise."""
    return await _reached(settings, settings.bulk_advertise or _dialable(bound))


async def _reached(settings: StageSettings, address: str) -> str:
    if not settings.advertise_via:
        return address
    stub_request = wan_pb2.MapTargetRequest(target=address, target_site=settings.site)
    async with open_channel(settings.advertise_via) as channel:
        try:
            reply = await wan_pb2_grpc.WanServiceStub(channel).MapTarget(
                stub_request, timeout=_PATIENCE_S, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            cause = from_rpc_error(error, settings.advertise_via)
            raise StageFailed(f"advertise_via: no port on the WAN emulator: {cause}") from error
    return reply.address


def _dialable(bound: str) -> str:
    host, _, port = bound.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in _WILDCARDS else bound
