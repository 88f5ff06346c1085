"""`python -m bench.transfer`: KV from pool to pool, two processes, every byte checked, against peers and the limit."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.figures import Figure
from bench.kv_jitter import itl_jitter, overlap
from bench.kv_link import BLOCK_BYTES, Moved, Remote, WrongBytes, pusher, remote
from bench.kv_peers import (
    BareGrpcSource,
    RawSource,
    install_mooncake,
    mooncake_engine,
    mooncake_write,
    peer_environment,
)
from bench.kv_receiver import BytesPool, cpu_s
from bench.kv_wan import across_wan
from bench.output import Report, arguments, curves
from kvrelay.grpc_core import WITHOUT_EVENT_ENGINE
from kvrelay.malloc import KEPT, keep_large_buffers

EMULATED = (
    "One host, loopback; `wan_*`, `small_*` through the WAN emulator (no loss, no congestion control). Intervals are "
    "the lowest and the highest of the rounds."
)
ALLOCATOR = (
    "glibc malloc, " + ", ".join(f"{name} {value >> 20} MiB" for name, value in KEPT.items()) + ", all processes"
)
GRPC = "without its event engine, as in kvrelay's programs, all processes"
_READY = "KVRELAY_BENCH_PEERS_LOADED"


@dataclass(frozen=True, slots=True)
class Plan:
    """Declared before the run."""

    large_blocks: int = 356
    """256 MB and a little: a prompt of 5,696 tokens of SmolLM2 in float32."""
    rounds: int = 7
    """Interleaved, after a warm-up round of each way."""
    connections: int = 4
    wan_rate: str = "1000mbit"
    wan_delay_ms: float = 20.0
    wan_rounds: int = 6
    streams: int = 8
    gaps: int = 5000
    """Of each kind, for `itl_jitter`."""
    overlap_tokens: int = 4096
    overlap_chunk: int = 256
    overlap_chunk_s: float = 0.1


QUICK = Plan(large_blocks=60, rounds=2, wan_rounds=2, gaps=300, overlap_chunk_s=0.02)

Send = Callable[[], Awaitable[None]]


def tell(text: str) -> None:
    """Progress."""
    print(f"... {text}", file=sys.stderr, flush=True)


async def timed(there: Remote, pool: BytesPool, send: Send) -> Moved:
    """One round of a peer, measured and checked like ours."""
    size = len(pool.data)
    await there.ask("begin")
    cpu, began = cpu_s(), time.monotonic()
    await send()
    took, cpu = time.monotonic() - began, cpu_s() - cpu
    told = await there.ask("told")
    if not (await there.ask("check", bytes=size))["equal"]:
        raise WrongBytes("bytes differ")
    return Moved(size, took, cpu, told["cpu_s"])


async def ways(life: AsyncExitStack, pool: BytesPool, plan: Plan) -> dict[str, Callable[[], Awaitable[Moved]]]:
    """Every way to move the pool's bytes, opened; Mooncake's only if it is installed."""
    blocks = plan.large_blocks
    found: dict[str, Callable[[], Awaitable[Moved]]] = {}
    for kind in ("bulk", "grpc"):
        ours = await life.enter_async_context(pusher(kind, pool, connections=plan.connections))
        found[kind] = lambda ours=ours: ours.round(blocks)  # type: ignore[misc]
    for name, paced in (("raw sockets", True), ("raw sockets, unpaced", False)):
        raw = await life.enter_async_context(remote("raw", blocks))
        sockets = await RawSource.connect(raw.told["address"], paced=paced)
        life.callback(sockets.close)
        found[name] = lambda raw=raw, sockets=sockets: timed(  # type: ignore[misc]
            raw, pool, lambda: sockets.send(pool.data)
        )
    bare = await life.enter_async_context(remote("bare-grpc", blocks))
    stream = BareGrpcSource(bare.told["address"])
    life.push_async_callback(stream.close)
    found["bare gRPC"] = lambda: timed(bare, pool, lambda: stream.send(pool.data))
    try:
        engine, _ = await asyncio.to_thread(mooncake_engine, pool.array)
        other = await life.enter_async_context(remote("mooncake", blocks, peer_environment()))
    except (ImportError, OSError) as error:
        tell(f"no Mooncake: {error}")
        return found

    async def write() -> None:
        there = other.told
        await asyncio.to_thread(
            mooncake_write, engine, there["address"], pool.array, there["pointer"], pool.array.nbytes
        )

    found["Mooncake, TCP"] = lambda: timed(other, pool, write)
    return found


def against(ours: Sequence[Moved], theirs: Sequence[Moved], target: str) -> Figure:
    """Median goodput ÷ median goodput; beside it the least and most of the rounds, which were interleaved."""
    pairs = [one.rate / other.rate for one, other in zip(ours, theirs, strict=True)]
    value = float(np.median([m.rate for m in ours]) / np.median([m.rate for m in theirs]))
    return Figure(value, min(pairs), max(pairs), target)


def cpu_figure(values: Sequence[float], target: str = "") -> Figure:
    """CPU seconds per GB: median, least, most."""
    return Figure(float(np.median(values)), min(values), max(values), target)


async def throughput(report: Report, plan: Plan, out: Path) -> None:
    """Goodput and CPU of every way, interleaved."""
    pool = BytesPool(plan.large_blocks, filled=True)
    moved: dict[str, list[Moved]] = {}
    async with AsyncExitStack() as life:
        every = await ways(life, pool, plan)
        for number in range(plan.rounds + 1):
            for name, move in every.items():
                one = await move()
                if number:
                    moved.setdefault(name, []).append(one)
    rows = []
    for name, rounds in moved.items():
        rates = [m.rate / 1e9 for m in rounds]
        send, receive = (
            [getattr(m, f"{side}_cpu_s") / m.payload_bytes * 1e9 for m in rounds] for side in ("send", "receive")
        )
        cells = [f"{np.median(rates):.2f}", f"{min(rates):.2f} .. {max(rates):.2f}"]
        rows.append([name, *cells, f"{np.median(send):.2f}", f"{np.median(receive):.2f}"])
        if name == "bulk":
            report.figures["bulk_send_cpu_s_per_gb"] = cpu_figure(send, "<= 0.6")
            report.figures["bulk_receive_cpu_s_per_gb"] = cpu_figure(receive, "<= 0.6")
    columns = ["way", "GB/s", "of rounds", "CPU s/GB, sender", "receiver"]
    report.tables.append((f"{plan.large_blocks * BLOCK_BYTES / 1e6:.0f} MB from pool to pool", columns, rows))
    report.figures["bulk_vs_raw"] = against(moved["bulk"], moved["raw sockets"], ">= 0.8")
    report.figures["bulk_vs_raw_unpaced"] = against(moved["bulk"], moved["raw sockets, unpaced"], "")
    if "Mooncake, TCP" in moved:
        report.figures["bulk_vs_mooncake"] = against(moved["bulk"], moved["Mooncake, TCP"], ">= 2.0")
    report.figures["grpc_vs_best_grpc"] = against(moved["grpc"], moved["bare gRPC"], ">= 0.85")
    report.data["rounds"] = {name: [asdict(m) for m in rounds] for name, rounds in moved.items()}
    series: Any = {n: (list(range(1, len(r) + 1)), [m.rate / 1e9 for m in r]) for n, r in moved.items()}
    title = "KV from pool to pool, loopback, two processes"
    report.pictures.append(curves(out / "transfer.png", series, "round", "GB/s", title=title))


async def transfer(plan: Plan, out: Path, *, quick: bool, only: Sequence[str]) -> Report:
    """All of it, or the sections named."""
    report = Report("transfer", quick, {**asdict(plan), "allocator": ALLOCATOR, "grpc": GRPC}, emulated=EMULATED)
    sections: dict[str, Callable[[], Awaitable[None]]] = {
        "throughput": lambda: throughput(report, plan, out),
        "wan": lambda: across_wan(report, plan.wan_rate, plan.wan_delay_ms, plan.wan_rounds),
        "jitter": lambda: itl_jitter(report, plan.streams, plan.gaps),
        "overlap": lambda: overlap(
            report, plan.overlap_tokens, plan.overlap_chunk, plan.overlap_chunk_s, max(plan.rounds, 2)
        ),
    }
    for name, section in sections.items():
        if not only or name in only:
            tell(name)
            try:
                await section()
            except WrongBytes as error:
                report.invalid.append(f"{name}: {error}")
    return report


def main() -> None:
    """Exit code 1: the run is invalid."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="sections: throughput, wan, jitter, overlap")
    wanted = parser.parse_args()
    if _READY not in os.environ:  # Mooncake's libraries are found only from the start of a process on
        try:
            install_mooncake()
        except (OSError, subprocess.CalledProcessError) as error:
            tell(f"no Mooncake: {error}")
        os.execve(
            sys.executable,
            [sys.executable, "-m", "bench.transfer", *sys.argv[1:]],
            {"GRPC_EXPERIMENTS": WITHOUT_EVENT_ENGINE} | os.environ | peer_environment() | {_READY: "1"},
        )
    keep_large_buffers()
    wanted.out.mkdir(parents=True, exist_ok=True)
    plan = QUICK if wanted.quick else Plan()
    report = uvloop.run(transfer(plan, wanted.out, quick=wanted.quick, only=wanted.only))
    code = report.finish(wanted.out)
    print(
        json.dumps({"bench": "transfer", **{name: round(figure.value, 4) for name, figure in report.figures.items()}})
    )
    sys.exit(code)


if __name__ == "__main__":
    main()
