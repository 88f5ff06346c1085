"""Two processes of bench.transfer joined: starts the receiver, commands it by lines, and pushes from a pool here."""

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from bench.kv_receiver import EPOCH, LAYOUT, BytesPool, cpu_s
from kvrelay.transfer.bulk_carrier import BulkCarriers
from kvrelay.transfer.carrier import CarrierFactory
from kvrelay.transfer.feed import BlockFeed
from kvrelay.transfer.grpc_carrier import GrpcCarrier
from kvrelay.transfer.sender import KvSender
from kvrelay.types import KvTarget, Role

BLOCK_BYTES = LAYOUT.block_bytes


@dataclass(frozen=True, slots=True)
class Moved:
    """One round: pool to pool, all bytes found equal."""

    payload_bytes: int
    seconds: float
    send_cpu_s: float
    receive_cpu_s: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.payload_bytes / self.seconds


class WrongBytes(Exception):
    """The receiver's pool differs from the sender's: no figure of this run counts."""


class Remote:
    """The receiving process."""

    def __init__(self, process: Any, told: dict[str, Any], reader: Any, writer: Any) -> None:
        self.process = process
        self.told = told
        self.pid = int(process.pid)
        self._writer = writer
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading = asyncio.create_task(self._read(reader))

    async def ask(self, do: str, **wanted: Any) -> dict[str, Any]:
        """One command, and its answer."""
        number = next(self._numbers)
        self._answers[number] = answer = asyncio.get_running_loop().create_future()
        self._writer.write((json.dumps({"n": number, "do": do, **wanted}) + "\n").encode())
        found: dict[str, Any] = await answer
        return found

    async def close(self) -> None:
        """Ends the process."""
        self._reading.cancel()
        self._writer.close()
        if self.process.returncode is None:
            self.process.terminate()
        await self.process.wait()

    async def _read(self, reader: Any) -> None:
        while line := await reader.readline():
            told = json.loads(line)
            self._answers.pop(told.pop("n")).set_result(told)
        for answer in self._answers.values():
            answer.set_exception(OSError("the receiving process ended"))


@asynccontextmanager
async def remote(
    kind: str,
    blocks: int,
    env: dict[str, str] | None = None,
    *,
    module: str = "bench.kv_receiver",
    options: dict[str, Any] | None = None,
) -> AsyncIterator[Remote]:
    """A receiving process of one kind: bulk, grpc, raw, bare-grpc or mooncake."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        json.dumps({"kind": kind, "blocks": blocks, **(options or {})}),
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | (env or {}),
    )
    assert process.stdout is not None
    line = b""
    while not line.startswith(b'{"control"'):
        line = await process.stdout.readline()
        if not line:
            raise OSError(f"the receiving process of {kind} did not start")
    told = json.loads(line)
    reader, writer = await asyncio.open_connection("127.0.0.1", told["control"])
    found = Remote(process, told, reader, writer)
    try:
        yield found
    finally:
        await found.close()


class Pusher:
    """A KvSender here and its receiver there."""

    def __init__(self, there: Remote, sender: KvSender, pool: BytesPool, address: str) -> None:
        self.there = there
        self.sender = sender
        self.pool = pool
        self._address = address
        self._numbers = itertools.count()

    async def push(self, blocks: int, first: int = 0, feed: BlockFeed | None = None) -> float:
        """Seconds from the Offer until this side knows that `blocks` blocks from `first` on are committed."""
        name = f"t{next(self._numbers)}"
        await self.there.ask("expect", id=name, first=first, blocks=blocks)
        committed = asyncio.create_task(self.there.ask("committed", id=name))
        if feed is None:
            feed = BlockFeed(range(first, first + blocks))
            feed.publish(blocks)
        began = time.monotonic()
        pushed = self.sender.push(KvTarget("peer", self._address, EPOCH, name, Role.MAIN), name, feed)
        result = await pushed.done()
        took = time.monotonic() - began
        self.committed_at = (await committed)["at"]
        if result.outcome != "committed":
            raise WrongBytes(f"{result.outcome}: {result.detail}")
        return took

    async def round(self, blocks: int) -> Moved:
        """One push of `blocks`, measured on both sides and checked."""
        await self.there.ask("begin")
        cpu = cpu_s()
        took = await self.push(blocks)
        cpu = cpu_s() - cpu
        told = await self.there.ask("told")
        await self.check(blocks)
        return Moved(blocks * BLOCK_BYTES, took, cpu, told["cpu_s"])

    async def check(self, blocks: int) -> None:
        """WrongBytes unless the first `blocks` blocks are there as they are here."""
        if not (await self.there.ask("check", bytes=blocks * BLOCK_BYTES))["equal"]:
            raise WrongBytes("bytes differ")


@asynccontextmanager
async def pusher(
    kind: str,
    pool: BytesPool,
    *,
    via: Any = None,
    connections: int = 4,
    module: str = "bench.kv_receiver",
    options: dict[str, Any] | None = None,
) -> AsyncIterator[Pusher]:
    """kind: bulk or grpc. `via`: maps an address to one through an emulator. `module`: the receiving program."""
    blocks = len(pool.data) // BLOCK_BYTES
    async with AsyncExitStack() as life:
        there = await life.enter_async_context(remote(kind, blocks, module=module, options=options))
        address = there.told["address"]
        if via is not None:
            address = await via(address)
            if there.told["bulk"]:
                await there.ask("advertise", address=await via(there.told["bulk"]))
        carrier: CarrierFactory = BulkCarriers() if kind == "bulk" else GrpcCarrier
        sender = KvSender(pool, LAYOUT, carrier=carrier, connections=connections)
        await life.enter_async_context(sender)
        yield Pusher(there, sender, pool, address)
