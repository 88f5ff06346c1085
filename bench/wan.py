"""`python -m bench.wan`: how fast the WAN emulator is and what it costs, as one JSON line. It runs by itself."""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvloop

from kvrelay.proto.v1 import wan_pb2, wan_pb2_grpc
from kvrelay.rpc.channels import open_channel

_PIECE = bytes(256 * 1024)


class _Sink(asyncio.BufferedProtocol):
    """Counts what comes."""

    def __init__(self, count: list[int]) -> None:
        self._count = count
        self._buffer = bytearray(1 << 20)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._count[0] += nbytes


@contextlib.asynccontextmanager
async def sink() -> AsyncIterator[str]:
    """host:port of a server that swallows what comes, while the block runs."""
    server = await asyncio.get_running_loop().create_server(lambda: _Sink([0]), "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def flood(address: str) -> None:
    """Writes to host:port as fast as it takes, until cancelled."""
    host, port = address.rsplit(":", 1)
    _, writer = await asyncio.open_connection(host, int(port))
    try:
        while True:
            writer.write(_PIECE)
            await writer.drain()
    finally:
        writer.transport.abort()


async def _measured(stub: Any, target: str, count: list[int], connections: int, seconds: float) -> dict[str, float]:
    reply = await stub.MapTarget(wan_pb2.MapTargetRequest(target=target, target_site="b"))
    floods = [asyncio.create_task(flood(reply.address)) for _ in range(connections)]
    await asyncio.sleep(0.5)
    before, bytes_before, began = await stub.GetLink(wan_pb2.GetLinkRequest()), count[0], time.perf_counter()
    await asyncio.sleep(seconds)
    after, bytes_after, ended = await stub.GetLink(wan_pb2.GetLinkRequest()), count[0], time.perf_counter()
    for task in floods:
        task.cancel()
    await asyncio.gather(*floods, return_exceptions=True)
    moved, cpu_s = bytes_after - bytes_before, after.cpu_s - before.cpu_s
    return {
        "mb_per_s": round(moved / (ended - began) / 1e6, 2),
        "cpu_s_per_gb": round(cpu_s / moved * 1e9, 3),
        "cpu_share": round(cpu_s / (ended - began), 3),
    }


async def _bench(seconds: float) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    count = [0]
    sink = await loop.create_server(lambda: _Sink(count), "127.0.0.1", 0)
    target = f"127.0.0.1:{sink.sockets[0].getsockname()[1]}"
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrelay.wan", "--listen=127.0.0.1:0", stderr=asyncio.subprocess.PIPE
    )
    assert program.stderr is not None
    results: dict[str, Any] = {}
    try:
        while b"serving" not in (line := await program.stderr.readline()):
            assert line, "the emulator did not start"
        async with open_channel(line.decode().split()[-1]) as channel:
            stub = wan_pb2_grpc.WanServiceStub(channel)
            for name, rate, delay_ms, connections in (
                ("unlimited", 0.0, 0.0, 1),
                ("1gbit_20ms_4_connections", 125e6, 20.0, 4),
                ("100mbit_20ms", 12.5e6, 20.0, 1),
                ("10mbit_20ms", 1.25e6, 20.0, 1),
            ):
                shape = wan_pb2.Direction(rate_bytes_per_s=rate, delay_ms=delay_ms)
                await stub.SetLink(wan_pb2.SetLinkRequest(a_to_b=shape, b_to_a=shape))
                results[name] = await _measured(stub, target, count, connections, seconds)
    finally:
        program.terminate()
        await program.communicate()
        sink.close()
    return {"bench": "wan", **results}


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    print(json.dumps(uvloop.run(_bench(parser.parse_args().seconds))))


if __name__ == "__main__":
    main()
