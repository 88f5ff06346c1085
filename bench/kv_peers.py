"""What bench.transfer measures kvrelay's carriers against: plain sockets, a bare gRPC stream, Mooncake over TCP."""

import asyncio
import ctypes.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np

from kvrelay.rpc.channels import BULK_OPTIONS, COMMON_OPTIONS
from kvrelay.transfer.bulk_socket import unpaced

PEERS = Path(os.environ.get("KVRELAY_BENCH_PEERS", Path.home() / ".cache/kvrelay-bench"))
"""Where peers are installed: never in the project's environment."""
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
_DEBIAN = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")
"""It loads them whatever transport it uses."""
PIECE_BYTES = 1024 * 1024
READ_BYTES = 256 * 1024
_METHOD = "/bench.Bytes/Stream"


class RawSink(asyncio.BufferedProtocol):
    """Reads straight into the pool; a byte back for each round. The first eight bytes of a round say its length."""

    def __init__(self, pool: memoryview) -> None:
        self._pool = pool
        self._head = memoryview(bytearray(8))
        self._headed = self._at = self._length = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of BufferedProtocol."""
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Part of BufferedProtocol."""
        if self._headed < 8:
            return self._head[self._headed :]
        return self._pool[self._at : min(self._at + READ_BYTES, self._length)]

    def buffer_updated(self, nbytes: int) -> None:
        """Part of BufferedProtocol."""
        if self._headed < 8:
            self._headed += nbytes
            self._length = int.from_bytes(self._head, "big")
            return
        self._at += nbytes
        if self._at == self._length:
            self._headed = self._at = 0
            assert self._transport is not None
            self._transport.write(b"!")


class RawSource:
    """The other end: writes from the pool, and waits for the byte."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, address: str, *, paced: bool = True) -> "RawSource":
        """To a RawSink. `paced`: as the kernel has it; else as kvrelay's own connections to a peer on this host."""
        host, port = address.rsplit(":", 1)
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if not paced:
            unpaced(sock)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        reader, writer = await asyncio.open_connection(sock=sock)
        writer.transport.set_write_buffer_limits(PIECE_BYTES)
        return cls(reader, writer)

    async def send(self, pool: memoryview) -> None:
        """One round."""
        self._writer.write(len(pool).to_bytes(8, "big"))
        for start in range(0, len(pool), READ_BYTES):
            self._writer.write(pool[start : start + READ_BYTES])
            await self._writer.drain()
        await self._reader.readexactly(1)

    def close(self) -> None:
        """Ends it."""
        self._writer.close()


class BareGrpcSink:
    """A gRPC stream of bytes without protobuf or checksums, copied into the pool: the best that grpc.aio can do."""

    def __init__(self, pool: memoryview) -> None:
        self._pool = pool

    async def _stream(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        at = 0
        async for piece in requests:
            if not piece:
                at = 0
                yield b"!"
                continue
            self._pool[at : at + len(piece)] = piece
            at += len(piece)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """host:port while the block runs."""
        server = grpc.aio.server(options=[*COMMON_OPTIONS, *BULK_OPTIONS])
        handler: Any = grpc.stream_stream_rpc_method_handler(self._stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Bytes", {"Stream": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0.1)


class BareGrpcSource:
    """The other end: an empty message ends a round."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[*COMMON_OPTIONS, *BULK_OPTIONS])
        self._call: Any = self._channel.stream_stream(_METHOD)()

    async def send(self, pool: memoryview, piece_bytes: int = PIECE_BYTES) -> None:
        """One round."""
        for start in range(0, len(pool), piece_bytes):
            await self._call.write(bytes(pool[start : start + piece_bytes]))
        await self._call.write(b"")
        await self._call.read()

    async def close(self) -> None:
        """Ends it."""
        self._call.cancel()
        await self._channel.close()


def install_mooncake() -> None:
    """Mooncake into `PEERS`, and the system libraries that it wants and this machine lacks, unpacked beside it.

    CalledProcessError, OSError: it cannot be had here.
    """
    target, libraries = PEERS / "mooncake", PEERS / "lib"
    if not (target / "mooncake").exists():
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*install, "--target", str(target), MOONCAKE], check=True)
    if not libraries.exists() and ctypes.util.find_library("ibverbs") is None:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["apt-get", "download", "-q", *_DEBIAN], cwd=folder, check=True)
            for package in Path(folder).glob("*.deb"):
                subprocess.run(["dpkg", "-x", str(package), folder], check=True)
            libraries.mkdir()
            for library in Path(folder).rglob("lib*.so.*"):
                shutil.copy(library, libraries / library.name)


def mooncake_engine(pool: np.ndarray) -> tuple[Any, str]:
    """Mooncake's engine over TCP with `pool` registered, and its name for others. ImportError: not there."""
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise OSError("mooncake: initialize failed")
    if engine.register_memory(pool.ctypes.data, pool.nbytes) != 0:
        raise OSError("mooncake: register_memory failed")
    return engine, f"127.0.0.1:{engine.get_rpc_port()}"


def mooncake_write(engine: Any, name: str, pool: np.ndarray, pointer: int, nbytes: int) -> float:
    """Seconds of one synchronous write of `nbytes` to the peer's memory at `pointer`."""
    began = time.perf_counter()
    if engine.transfer_sync_write(name, pool.ctypes.data, pointer, nbytes) != 0:
        raise OSError("mooncake: transfer failed")
    return time.perf_counter() - began


def peer_environment() -> dict[str, str]:
    """For processes that load Mooncake: its folder, and that of the libraries it wants."""
    found = {"PYTHONPATH": f"{PEERS / 'mooncake'}:{os.environ.get('PYTHONPATH', '')}", "MC_LOG_LEVEL": "2"}
    return found | {"LD_LIBRARY_PATH": f"{PEERS / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}"}
