"""A fleet as the router sees it: what a decision of the planner takes, what many stages cost when nothing is asked."""

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

import numpy as np
import psutil

from bench.router_systems import Plan, Router, answered, kvrelay_router, null, request
from kvrelay.proto.v1 import router_pb2
from kvrelay.types import LayoutFingerprint, LinkLoad, Role, StageDescription, StageLoad
from services.router.policies import Pdd
from services.router.route import Limits, Question, StageView

REPORTS_S = 0.1
"""Between the load reports of a stage at work (the product's default); an idle one sends a tenth of that."""


def fleet_of(count: int) -> tuple[StageView, ...]:
    """A quarter prefill and relay each, half main; every prefill stage has a link to every decode stage."""
    roles = [(Role.PREFILL, Role.RELAY, Role.MAIN, Role.MAIN)[n % 4] for n in range(count)]
    names = [f"{role}-{n}" for n, role in enumerate(roles)]
    layout = LayoutFingerprint("w", 30, 3, 64, 16, "float16", "r")
    links = tuple(LinkLoad(n, 1e8 + i, 1000 * i) for i, n in enumerate(names) if not n.startswith("prefill"))
    views = []
    for n, (role, name) in enumerate(zip(roles, names, strict=True)):
        site = "b" if role is Role.MAIN else "a"
        description = StageDescription(name, 7, role, site, "h:1", "m", "t", layout, 49152, 1 << 17, 1 << 16, 64, (2,))
        load = StageLoad(
            running=n % 13,
            waiting=0,
            max_running=64,
            blocks_total=1 << 16,
            blocks_free=100,
            blocks_cached=1000,
            queued_tokens=100 * n,
            prefill_tokens_per_s=5000.0,
            step_ms=20.0,
            links=links if role is Role.PREFILL else (),
        )
        views.append(StageView(description, load))
    return tuple(views)


def planner_us(stages: int) -> float:
    """Microseconds of one decision, the median of many; half of the stages hold some of the prompt."""
    views = fleet_of(stages)
    hits = {view.instance_id: 512 * n for n, view in enumerate(views) if n % 2}
    policy, limits, took = Pdd(), Limits(), []
    for turn in range(400):
        asked = Question(65536, 1024, views, hits, turn=turn)
        began = time.perf_counter()
        policy.choose(asked, limits)
        took.append((time.perf_counter() - began) * 1e6)
    return float(np.median(took))


@dataclass(frozen=True, slots=True)
class FleetSeen:
    """One router with many null stages of which each reports its load, prefill stages with a link to each other."""

    stages: int
    join_s: float
    """From the router's start until it may use all of them."""
    report_us: float
    """CPU-microseconds of the router for one load report, keep-alive and views included."""
    resident_mb: float
    stream_kb: float
    """Resident memory for each request whose answer is under way."""


async def fleet_seen(stages: int, streams: int, seconds: float) -> FleetSeen:
    """Starts them, looks on for so long, then opens so many streams. The stages are one process."""
    async with AsyncExitStack() as stack:
        addresses, _ = await null(stack, "stages", str(stages), str(REPORTS_S))
        began = time.perf_counter()
        router = await kvrelay_router(stack, addresses)
        joined = time.perf_counter() - began
        before = router.cpu_s()
        await asyncio.sleep(seconds)
        reports = stages * seconds / REPORTS_S
        used = (router.cpu_s() - before) / reports * 1e6
        idle = _resident(router)
        grown = await _resident_with(router, streams) - idle
    return FleetSeen(stages, joined, used, idle / 1e6, grown / streams / 1e3)


async def _resident_with(router: Router, streams: int) -> int:
    """While so many answers of 16 tokens are under way, one token every 200 ms."""
    pace_us = 200_000
    one = request(Plan(), 16, pace_us, router_pb2.PIPELINE_MD)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            asked = router_pb2.GenerateRequest()
            asked.CopyFrom(one)
            asked.request_id = ""
            tasks.create_task(answered(router.stub, asked))
        await asyncio.sleep(8 * pace_us / 1e6)
        return _resident(router)


def _resident(router: Router) -> int:
    return int(psutil.Process(router.pid).memory_info().rss)
