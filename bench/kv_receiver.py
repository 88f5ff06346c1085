"""The receiving process of bench.transfer: a pool, one way into it, and what was measured there. Obeys lines of JSON.

`python -m bench.kv_receiver '{"kind": "bulk", ...}'` prints {"control": port, ...}; each line of JSON on that port is
answered by one. Times are of the monotonic clock, which all processes of a host share.
"""

import asyncio
import json
import resource
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import uvloop

from bench.kv_peers import BareGrpcSink, RawSink, mooncake_engine
from kvrelay.malloc import keep_large_buffers
from kvrelay.rpc.server import grpc_server
from kvrelay.transfer.bulk_server import bulk_server
from kvrelay.transfer.receiver import IncomingTransfer, KvReceiver
from kvrelay.transfer.servicer import SERVICE, KvTransferServicer, add_to_server
from kvrelay.types import LayoutFingerprint

EPOCH = 1
LAYOUT = LayoutFingerprint("bench", 30, 3, 64, 16, "float32", "none")
"""SmolLM2-135M's: 720 KiB a block of 16 tokens."""


def contents(nbytes: int) -> np.ndarray:
    """What the sender's pool holds: the same in every process."""
    return np.random.default_rng(135).integers(0, 256, nbytes, np.uint8)


def cpu_s() -> float:
    """Of this process, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class BytesPool:
    """Blocks in one numpy array, and when they were first and last written to."""

    def __init__(self, blocks: int, filled: bool = False) -> None:
        self.size = LAYOUT.block_bytes
        self.array = contents(blocks * self.size) if filled else np.zeros(blocks * self.size, np.uint8)
        self.array[::4096] += 0  # no page fault is left to be paid by the first run
        self.data = self.array.data
        self.first_s = 0.0

    def read(self, block_id: int) -> memoryview:
        """Part of KvBytes."""
        return self.data[block_id * self.size : (block_id + 1) * self.size].toreadonly()

    def write(self, block_id: int, offset: int, payload: bytes | memoryview) -> None:
        """Part of KvBytes."""
        start = block_id * self.size + offset
        self.first_s = self.first_s or time.monotonic()
        self.data[start : start + len(payload)] = payload

    def view(self, block_id: int) -> memoryview | None:
        """Part of KvBytes."""
        self.first_s = self.first_s or time.monotonic()
        return self.data[block_id * self.size : (block_id + 1) * self.size]


class Receiver:
    """Obeys lines."""

    def __init__(self, blocks: int) -> None:
        self.pool = BytesPool(blocks)
        self.expected = contents(blocks * self.pool.size)
        self.receiver = KvReceiver(self.pool, LAYOUT, epoch=EPOCH)
        self.incoming: dict[str, IncomingTransfer] = {}
        self.cpu_before = 0.0

    async def obey(self, wanted: dict[str, Any]) -> dict[str, Any]:
        """One command."""
        match wanted["do"]:
            case "begin":
                self.pool.first_s, self.cpu_before = 0.0, cpu_s()
            case "expect":
                ids = range(wanted["first"], wanted["first"] + wanted["blocks"])
                self.incoming[wanted["id"]] = self.receiver.expect(wanted["id"], ids, 0)
            case "committed":
                await self.incoming[wanted["id"]].committed()
                self.incoming.pop(wanted["id"]).end()
                return {"at": time.monotonic()}
            case "told":
                return {"cpu_s": cpu_s() - self.cpu_before, "first_s": self.pool.first_s}
            case "check":
                return {"equal": self._check(wanted["bytes"])}
            case "advertise":
                if self.receiver.doors is not None:
                    self.receiver.doors.advertised = wanted["address"]  # type: ignore[attr-defined]
        return {}

    def _check(self, nbytes: int) -> bool:
        """Whether every byte is here; they are cleared."""
        equal = bool(np.array_equal(self.pool.array[:nbytes], self.expected[:nbytes]))
        self.pool.array[:nbytes] = 0
        return equal

    async def serve(self, kind: str, life: AsyncExitStack) -> dict[str, Any]:
        """Opens the way in."""
        if kind == "raw":
            server = await asyncio.get_running_loop().create_server(lambda: RawSink(self.pool.data), "127.0.0.1", 0)
            return {"address": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"}
        if kind == "bare-grpc":
            return {"address": await life.enter_async_context(BareGrpcSink(self.pool.data).serving())}
        if kind == "mooncake":
            engine, name = await asyncio.to_thread(mooncake_engine, self.pool.array)
            life.callback(lambda: engine)
            return {"address": name, "pointer": self.pool.array.ctypes.data}
        told = {"bulk": ""}
        if kind == "bulk":
            bulk = await life.enter_async_context(bulk_server("127.0.0.1:0"))
            self.receiver.doors = bulk
            told["bulk"] = bulk.address
        pushes = KvTransferServicer(self.receiver)
        serving = grpc_server("127.0.0.1:0", lambda server: add_to_server(pushes, server), [SERVICE], grace_s=0.1)
        grpc = await life.enter_async_context(serving)
        return {"address": grpc.address, **told}


async def main(more: dict[str, Any] | None = None) -> None:
    """Until the control connection closes. `more`: to be told beside the addresses."""
    plan = json.loads(sys.argv[1])
    receiver = Receiver(plan["blocks"])
    over = asyncio.Event()

    async def control(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting: set[asyncio.Task[None]] = set()

        async def answer(wanted: dict[str, Any]) -> None:
            result = await receiver.obey(wanted)
            writer.write((json.dumps({"n": wanted["n"], **result}) + "\n").encode())

        while line := await reader.readline():
            task = asyncio.create_task(answer(json.loads(line)))
            waiting.add(task)
            task.add_done_callback(waiting.discard)
        over.set()

    async with AsyncExitStack() as life:
        told = await receiver.serve(plan["kind"], life)
        listener = await asyncio.start_server(control, "127.0.0.1", 0)
        print(json.dumps({"control": listener.sockets[0].getsockname()[1], **told, **(more or {})}), flush=True)
        await over.wait()
        listener.close()


if __name__ == "__main__":
    keep_large_buffers()
    uvloop.run(main())
