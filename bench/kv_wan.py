"""bench.transfer's section about the WAN: how full the link is, and how long a small transfer waits behind a large."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import numpy as np

from bench.figures import Figure
from bench.kv_link import BLOCK_BYTES, Pusher, pusher
from bench.kv_receiver import BytesPool
from bench.output import Report
from kvrelay.proto.v1 import wan_pb2, wan_pb2_grpc
from kvrelay.rpc.channels import open_channel
from kvrelay.wan.settings import parse_rate

MIB = 1024 * 1024
MIXED_MIB = (2, 3, 4, 2, 8, 2, 4, 16) * 4
"""32 at once."""
SMALL, LARGE = 2, 356
"""Blocks: 1.4 and 250 MiB."""
STARTED_S = 0.5
"""So long has the large one been under way."""

Via = Callable[[str], Awaitable[str]]


@asynccontextmanager
async def emulator(rate: str, delay_ms: float) -> AsyncIterator[Via]:
    """A WAN emulator of its own process; maps addresses at site B."""
    command = ["-m", "kvrelay.wan", "--listen=127.0.0.1:0", f"--rate={rate}", f"--delay-ms={delay_ms:g}"]
    program = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    assert program.stderr is not None
    while b"serving" not in (line := await program.stderr.readline()):
        if not line:
            raise OSError("the emulator did not start")
    try:
        async with open_channel(line.decode().split()[-1]) as channel:
            stub = wan_pb2_grpc.WanServiceStub(channel)

            async def via(address: str) -> str:
                return (await stub.MapTarget(wan_pb2.MapTargetRequest(target=address, target_site="b"))).address

            yield via
    finally:
        program.terminate()
        await program.communicate()


async def across_wan(report: Report, rate: str, delay_ms: float, rounds: int) -> None:
    """Both carriers; the targets are the bulk carrier's."""
    pool = BytesPool(LARGE + SMALL, filled=True)
    rows = []
    for kind in ("bulk", "grpc"):
        async with emulator(rate, delay_ms) as via, pusher(kind, pool, via=via) as ours:
            one = await one_alone(ours, parse_rate(rate), rounds)
            mixed = await many_mixed(ours, parse_rate(rate), rounds)
            alone, behind = await small_behind_large(ours, rounds)
        late = [(b - a) * 1e3 for a, b in zip(alone, behind, strict=True)]
        if kind == "bulk":
            report.figures["wan_utilization_one"] = _of(one, ">= 0.95")
            report.figures["wan_utilization_mixed"] = _of(mixed, ">= 0.95")
            report.figures["small_behind_large_ms"] = _of(late, "<= 45")
        cells = [f"{np.median(one):.3f}", f"{np.median(mixed):.3f}", f"{np.median(alone) * 1e3:.0f}"]
        rows.append([kind, *cells, f"{np.median(behind) * 1e3:.0f}"])
        report.data[f"wan_{kind}"] = {"one": one, "mixed": mixed, "alone_s": alone, "behind_s": behind}
    columns = ["carrier", "one of 64 MiB", "32 mixed", "1.4 MiB alone, ms", "behind 250 MiB, ms"]
    report.tables.append((f"WAN {rate}, {delay_ms:g} ms one way: payload rate ÷ link rate", columns, rows))


async def one_alone(ours: Pusher, rate: float, rounds: int) -> list[float]:
    """Utilization between the first frame and the commit, at the receiver; the link was in use a moment before."""
    blocks = -(-64 * MIB // BLOCK_BYTES)
    used = []
    for number in range(rounds + 2):
        await ours.there.ask("begin")
        await ours.push(blocks)
        first_s = (await ours.there.ask("told"))["first_s"]
        await ours.check(blocks)
        if number > 1:  # two warm-ups: the first finds the rate
            used.append(blocks * BLOCK_BYTES / (ours.committed_at - first_s) / rate)
    return used


async def many_mixed(ours: Pusher, rate: float, rounds: int) -> list[float]:
    """The same of 32 transfers at once."""
    sizes = [-(-mib * MIB // BLOCK_BYTES) for mib in MIXED_MIB]
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    used = []
    for _ in range(rounds):
        await ours.there.ask("begin")
        await asyncio.gather(*(ours.push(n, first) for n, first in zip(sizes, firsts, strict=True)))
        first_s = (await ours.there.ask("told"))["first_s"]
        await ours.check(sum(sizes))
        used.append(sum(sizes) * BLOCK_BYTES / (ours.committed_at - first_s) / rate)
    return used


async def small_behind_large(ours: Pusher, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds from Offer to commit of a small transfer: alone, and behind a large one."""
    alone, behind = [], []
    for _ in range(rounds):
        alone.append(await ours.push(SMALL, LARGE))
        large = asyncio.create_task(ours.push(LARGE))
        await asyncio.sleep(STARTED_S)
        behind.append(await ours.push(SMALL, LARGE))
        assert not large.done(), "the large one had ended before the small one"
        await large
        await ours.check(LARGE + SMALL)
    return alone, behind


def _of(values: list[float], target: str) -> Figure:
    return Figure(float(np.median(values)), min(values), max(values), target)
