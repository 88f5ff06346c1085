"""The emulator as a program: wiring only."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvrelay.proto.v1 import wan_pb2_grpc
from kvrelay.rpc.server import grpc_server
from kvrelay.wan.emulator import WanEmulator
from kvrelay.wan.servicer import SERVICE, WanServicer
from kvrelay.wan.settings import WanSettings


@asynccontextmanager
async def wan_emulator(settings: WanSettings) -> AsyncIterator[WanEmulator]:
    """A running emulator with its admin service at `.admin_address`. OSError: an address cannot be bound."""
    emulator = WanEmulator(settings)
    try:
        await emulator.start()
        servicer = WanServicer(emulator)
        async with grpc_server(
            settings.listen,
            lambda server: wan_pb2_grpc.add_WanServiceServicer_to_server(servicer, server),
            [SERVICE],
            grace_s=settings.shutdown_grace_s,
        ) as server:
            emulator.admin_address = server.address
            yield emulator
    finally:
        await emulator.close()


async def serve(settings: WanSettings) -> None:
    """Runs the emulator until SIGINT or SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with wan_emulator(settings):
        await stop.wait()
