"""A target that counts, and callers, for tests of the emulator. Knows nothing of gRPC."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kvrelay.wan.emulator import WanEmulator
from kvrelay.wan.settings import WanSettings

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Target:
    """Echoes lines that begin with "echo"; counts the bytes of all others, by connection in order of acceptance."""

    address: str = ""
    received: list[int] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    """How connections ended: "eof" or "reset"."""
    reading: asyncio.Event = field(default_factory=asyncio.Event)
    said: bytes = b""
    """Sent to every caller after its EOF."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self.received)
        self.received.append(0)
        try:
            while True:
                await self.reading.wait()
                data = await reader.read(1 << 18)
                if not data:
                    break
                self.received[number] += len(data)
                if data.startswith(b"echo"):
                    writer.write(data)
            self.ended.append("eof")
            writer.write(self.said)
            await writer.drain()
        except OSError:
            self.ended.append("reset")
        finally:
            writer.close()


@asynccontextmanager
async def a_target() -> AsyncIterator[Target]:
    """A target on a free port."""
    target = Target()
    target.reading.set()
    server = await asyncio.start_server(target.serve, "127.0.0.1", 0, limit=1 << 20)
    target.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield target


@asynccontextmanager
async def relaying(settings: WanSettings) -> AsyncIterator[WanEmulator]:
    """An emulator without its admin service."""
    emulator = WanEmulator(settings)
    try:
        await emulator.start()
        yield emulator
    finally:
        await emulator.close()


async def dial(address: str) -> Streams:
    """A connection to host:port."""
    host, port = address.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


@asynccontextmanager
async def dialled(address: str) -> AsyncIterator[Streams]:
    """The same, closed at the end."""
    reader, writer = await dial(address)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def echo(streams: Streams) -> float:
    """Seconds that a small message takes there and back."""
    reader, writer = streams
    began = time.perf_counter()  # the loop's own clock counts milliseconds
    writer.write(b"echo")
    await reader.readexactly(4)
    return time.perf_counter() - began


async def flood(writer: asyncio.StreamWriter, total: int = 1 << 40) -> None:
    """Writes until cancelled, or `total` bytes."""
    piece = bytes(64 * 1024)
    while total > 0:
        writer.write(piece[:total])
        total -= len(piece)
        await writer.drain()
        await asyncio.sleep(0)


async def quiet(emulator: WanEmulator) -> None:
    """Waits until the emulator has let go of every connection."""
    await until(lambda: not emulator.connections)


async def until(true: Callable[[], object], within_s: float = 5.0) -> None:
    """Waits for something that another party does."""
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - it is a question to a third party
            await asyncio.sleep(0.001)
