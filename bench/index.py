"""`python -m bench.index`: the prefix index on a real Redis. Look-ups, announcements, memory, and how they grow."""

import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.contest import tell
from bench.figures import Figure
from bench.output import Report, arguments, curves
from kvrelay.index import store
from kvrelay.index.redis import RedisIndex
from kvrelay.index.server import start_redis
from kvrelay.index.writer import InstanceWriter
from kvrelay.load.hits import SKEWED, HitRates
from kvrelay.types import CacheChange, LayoutFingerprint, Role, StageDescription

ABOUT = (
    "A real redis-server on this host, over loopback; look-ups by RedisIndex, writes by InstanceWriter of another "
    "process. Nothing is emulated. Intervals are the lowest and the highest of the runs."
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Declared before the run."""

    blocks: int = 1_000_000
    instances: int = 64
    holders: int = 4
    prompt_blocks: int = 4096
    hits: str = SKEWED
    lookups: int = 400
    """Of a run."""
    runs: int = 5
    changes_per_s: tuple[float, ...] = (0.0, 25_000.0, float("inf"))
    """By concurrent writers. 64 stages that each take in one prompt of 4096 blocks a second, 90 % cached: 26,000."""
    fleets: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    prompts: tuple[int, ...] = (16, 64, 256, 1024, 4096, 16384)


QUICK = Plan(blocks=40_960, lookups=60, runs=3, fleets=(8, 64), prompts=(64, 4096))


@dataclass(slots=True)
class Filled:
    """A Redis that holds documents of `prompt_blocks` blocks, each at some instances."""

    url: str
    documents: list[list[bytes]]
    fresh: list[list[bytes]]
    """Prompts that nobody holds: the ends of prompts that branch off."""


def describe(number: int) -> StageDescription:
    """A stage of the fleet."""
    layout = LayoutFingerprint("w", 30, 3, 64, 16, "float16", "r")
    name = f"main-{number}"
    return StageDescription(
        name, 1000 + number, Role.MAIN, "b", "10.0.0.1:7103", "m", "t", layout, 49152, 65536, 65536, 64, (2,)
    )


def chains(seed: int, count: int, blocks: int) -> list[list[bytes]]:
    """Hashes as good as any: `count` prompts."""
    noise = np.random.default_rng(seed).bytes(16 * blocks * count)
    return [[noise[16 * i : 16 * i + 16] for i in range(d * blocks, (d + 1) * blocks)] for d in range(count)]


def holders_of(document: int, plan: Plan) -> list[int]:
    """Spread evenly, in ever other company."""
    chance = np.random.default_rng([document, plan.instances])
    first = document * plan.holders % plan.instances
    others = chance.permutation(plan.instances)
    return [first, *(int(i) for i in others if i != first)][: min(plan.holders, plan.instances)]


async def fill(url: str, plan: Plan) -> tuple[Filled, list[float]]:
    """-> what Redis holds, and (block, holder) pairs a second as one stage after the other announced its cache."""
    count = max(1, round(plan.blocks / plan.prompt_blocks))
    documents = chains(1, count, plan.prompt_blocks)
    owned: dict[int, list[bytes]] = {n: [] for n in range(plan.instances)}
    for number, document in enumerate(documents):
        for holder in holders_of(number, plan):
            owned[holder] += document
    client = store.connect(url, timeout_s=5)
    rates = []
    for number, hashes in owned.items():
        writer = InstanceWriter(client, describe(number), ttl_s=3600, call_timeout_s=30)
        began = time.perf_counter()
        await writer.begin(take_over=True)
        await writer.announce(hashes)
        rates.append(len(hashes) / (time.perf_counter() - began))
    await client.aclose()
    return Filled(url, documents, chains(2, 8, plan.prompt_blocks)), rates


def questions(filled: Filled, plan: Plan, seed: int) -> list[tuple[list[bytes], int]]:
    """Prompts, each with the depth that its holders have."""
    chance, hits = np.random.default_rng(seed), HitRates.parse(plan.hits)
    asked = []
    for _ in range(plan.lookups):
        depth = int(hits.draw(chance) * plan.prompt_blocks)
        document = filled.documents[int(chance.integers(len(filled.documents)))]
        asked.append((document[:depth] + filled.fresh[int(chance.integers(8))][depth:], depth))
    return asked


async def ask(index: RedisIndex, asked: Sequence[tuple[list[bytes], int]], holders: int) -> list[float]:
    """Milliseconds of each look-up, one after the other. RuntimeError: a wrong answer."""
    took = []
    for prompt, depth in asked:
        began = time.perf_counter()
        answer = await index.lookup(prompt)
        took.append((time.perf_counter() - began) * 1e3)
        if answer.degraded or list(answer.depths.values()) != [depth] * holders:
            raise RuntimeError(f"expected {holders} holders of {depth} blocks, got {answer}")
    return took


@asynccontextmanager
async def writers(url: str, changes_per_s: float, blocks: int) -> AsyncIterator[list[float]]:
    """Another process in which stages cache and evict prompts of `blocks` blocks; then yields [changes a second]."""
    rate: list[float] = []
    if not changes_per_s:
        yield rate
        return
    context = multiprocessing.get_context("spawn")
    stop, started = context.Event(), context.Event()
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=write_on, args=(url, changes_per_s, blocks, started, stop, writer), daemon=True)
    process.start()
    try:
        await asyncio.to_thread(started.wait, 30)
        yield rate
        stop.set()
        rate.append(await asyncio.to_thread(reader.recv))
    finally:
        stop.set()
        await asyncio.to_thread(process.join, 10)


def write_on(url: str, changes_per_s: float, blocks: int, started: Event, stop: Event, result: Any) -> None:
    """The other process."""
    uvloop.run(_write_on(url, changes_per_s, blocks, started, stop, result))


async def _write_on(url: str, changes_per_s: float, blocks: int, started: Event, stop: Event, result: Any) -> None:
    client = store.connect(url, timeout_s=5)
    crew = [InstanceWriter(client, replace(describe(n), instance_id=f"writer-{n}"), ttl_s=60) for n in range(4)]
    prompts = chains(3, len(crew), blocks)
    for writer in crew:
        await writer.begin(take_over=True)
        await writer.announce([])
    written, began = 0, time.perf_counter()
    started.set()

    async def churn(writer: InstanceWriter, prompt: list[bytes]) -> None:
        nonlocal written
        for added in _forever():
            for start in range(0, len(prompt), writer.BATCH):
                batch = prompt[start : start + writer.BATCH]
                await writer.apply([CacheChange(added, block) for block in batch])
                written += len(batch)
                if stop.is_set():
                    return
                ahead_s = written / changes_per_s - (time.perf_counter() - began)
                if ahead_s > 0:
                    await asyncio.sleep(ahead_s)

    async with asyncio.TaskGroup() as tasks:
        for writer, prompt in zip(crew, prompts, strict=True):
            tasks.create_task(churn(writer, prompt))
    result.send(written / (time.perf_counter() - began))
    for writer in crew:
        await writer.leave()
    await client.aclose()


def _forever() -> Any:
    while True:
        yield True
        yield False


async def memory(url: str) -> dict[str, Any]:
    """What Redis says of its memory."""
    client = store.connect(url, timeout_s=5)
    found: dict[str, Any] = await client.info("memory")
    await client.aclose()
    return {name: found[name] for name in ("used_memory", "used_memory_rss", "maxmemory_policy")}


async def lookups(report: Report, filled: Filled, plan: Plan) -> None:
    """Times of look-ups, with and without writers."""
    rows: list[list[str]] = []
    async with RedisIndex(filled.url, timeout_s=1.0) as index:
        await ask(index, questions(filled, plan, 0)[:50], plan.holders)
        for wanted in plan.changes_per_s:
            runs: list[np.ndarray] = []
            rates: list[float] = []
            for run in range(plan.runs):
                async with writers(filled.url, wanted, plan.prompt_blocks) as rate:
                    took = await ask(index, questions(filled, plan, run + 1), plan.holders)
                runs.append(np.percentile(took, [50, 99, 100]))
                rates += rate
            flat_out = wanted == float("inf")
            name = "lookup_writers_flat_out" if flat_out else "lookup_with_writers" if wanted else "lookup"
            for at, (percent, target) in enumerate((("p50", "<= 2"), ("p99", "<= 6"))):
                values = [run[at] for run in runs]
                report.figures[f"{name}_{percent}_ms"] = spread(values, "" if flat_out else target)
            seen = float(np.median(rates)) if rates else 0.0
            middle = np.median(runs, axis=0)
            rows.append([f"{seen:,.0f}", *(f"{value:.2f}" for value in middle)])
            tell(f"look-ups beside {seen:,.0f} changes/s: {middle.round(2).tolist()} ms (P50, P99, most)")
    report.tables.append(("look-ups beside writers", ["changes/s", "P50 ms", "P99 ms", "most ms"], rows))


async def growth(report: Report, url: str, plan: Plan, out: Path) -> None:
    """Look-up time against prompt length and fleet size; Redis holds 16 documents of the longest prompt each time."""
    client = store.connect(url, timeout_s=5)
    by_prompt, by_fleet = {}, {}
    largest = max(plan.prompts)
    await client.flushall()
    filled, _ = await fill(url, replace(plan, blocks=4 * largest, prompt_blocks=largest))
    for length in plan.prompts:
        by_prompt[length] = await _median(filled, plan, length)
    for fleet in plan.fleets:
        await client.flushall()
        sized = replace(plan, instances=fleet, blocks=16 * plan.prompt_blocks)
        filled, _ = await fill(url, sized)
        by_fleet[fleet] = await _median(filled, sized, plan.prompt_blocks)
    await client.aclose()
    for name, unit, found in (("prompt length", "blocks", by_prompt), ("fleet size", "instances", by_fleet)):
        rows = [[f"{x}", f"{both[0]:.3f}", f"{both[1]:.3f}"] for x, both in found.items()]
        report.tables.append((f"look-up against {name}", [unit, "P50 ms", "in Redis ms"], rows))
        report.data[name.replace(" ", "_")] = found
        series = {
            "whole look-up, P50": (list(found), [both[0] for both in found.values()]),
            "of it in Redis": (list(found), [both[1] for both in found.values()]),
        }
        path = out / f"index-{name.split()[0]}.png"
        report.pictures.append(curves(path, series, f"{name} ({unit})", "ms", log=True, title=f"look-up, {name}"))


async def _median(filled: Filled, plan: Plan, length: int) -> tuple[float, float]:
    """(a look-up's P50, of it inside Redis) in milliseconds, for prompts of which half is held."""
    client = store.connect(filled.url, timeout_s=5)
    asked = [document[: length // 2] + filled.fresh[0][: length - length // 2] for document in filled.documents]
    async with RedisIndex(filled.url, timeout_s=1.0) as index:
        many = [(prompt, length // 2) for prompt in asked] * max(1, plan.lookups // len(asked))
        await ask(index, many[:10], min(plan.holders, plan.instances))
        await client.config_resetstat()
        took = await ask(index, many, min(plan.holders, plan.instances))
    stats: Any = await client.info("commandstats")
    await client.aclose()
    return float(np.median(took)), stats["cmdstat_evalsha"]["usec_per_call"] / 1e3


def spread(values: Sequence[float], target: str = "") -> Figure:
    """The median of runs, between the lowest and the highest."""
    return Figure(float(np.median(values)), float(min(values)), float(max(values)), target)


async def index(plan: Plan, out: Path, *, quick: bool) -> Report:
    """All of it, on one Redis."""
    report = Report("index", quick, asdict(plan), emulated=ABOUT)
    async with start_redis() as server:
        empty = await memory(server.url)
        filled, rates = await fill(server.url, plan)
        tell(f"announced {np.median(rates):,.0f} blocks a second")
        full = await memory(server.url)
        blocks = sum(map(len, filled.documents))
        if full["maxmemory_policy"] != "noeviction":
            report.invalid.append(f"Redis evicts: {full['maxmemory_policy']}")
        report.data["memory"] = full
        await lookups(report, filled, plan)
        report.figures["announce_blocks_per_s"] = spread(rates, ">= 50000")
        used = (full["used_memory"] - empty["used_memory"]) / blocks
        report.figures["bytes_per_block"] = Figure(used, target="<= 160")
        resident = (full["used_memory_rss"] - empty["used_memory_rss"]) / blocks
        report.figures["resident_bytes_per_block"] = Figure(resident)
        await growth(report, server.url, plan, out)
    return report


def main() -> None:
    """Exit code 1: the run is invalid. The last line is one JSON object."""
    wanted = arguments(__doc__).parse_args()
    report = uvloop.run(index(QUICK if wanted.quick else Plan(), wanted.out, quick=wanted.quick))
    code = report.finish(wanted.out)
    print(json.dumps({name: figure.value for name, figure in report.figures.items()}))
    sys.exit(code)


if __name__ == "__main__":
    main()
