"""Runs one workload on one system: start, warm up, settle, measure, stop. Knows processes, computes no figure."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from bench.rig import Rig, System
from kvrelay.cli.cluster import Cluster, cluster
from kvrelay.load.arrival import Arrival, ClosedLoop
from kvrelay.load.record import Record
from kvrelay.load.run import LoadOptions, LoadRun
from kvrelay.load.target import RouterTarget
from kvrelay.load.workload import Conversation, Workload
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc, wan_pb2, wan_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel

VOCAB_SIZE = 264
MOST_OVERRUN = 0.01
TIMEOUT_S = 120.0


class InvalidRun(Exception):
    """What was measured says nothing; the text says why."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a measurement may be believed."""

    steps: int = 0
    overrun: int = 0
    """Paced steps that took longer than their pace."""
    failed: int = 0
    """Requests."""
    cores: float = 0.0
    """CPU of all processes of the topology and of this one, in cores."""
    load_average: float = 0.0
    """Of the machine, over one minute, at the end: it may be shared."""

    @property
    def overrun_share(self) -> float:
        """Of all steps."""
        return self.overrun / self.steps if self.steps else 0.0

    @property
    def too_busy(self) -> bool:
        """The machine did not keep the pace."""
        return self.overrun_share > MOST_OVERRUN

    def why_not(self) -> str:
        """Why it must not be believed; empty: valid."""
        if self.too_busy:
            return f"{self.overrun} of {self.steps} steps ({self.overrun_share:.1%}) overran their pace; 1 % at most"
        return f"{self.failed} requests failed" if self.failed else ""


@dataclass(frozen=True, slots=True)
class Measured:
    """One workload on one system."""

    records: list[Record] = field(repr=False)
    wall_s: float
    wan_bytes: int
    """Site A to site B, all in: KV, ids, control."""
    link_busy_s: float
    health: Health


@dataclass(frozen=True, slots=True)
class WarmUp:
    """A workload's warm-up as a workload whose answers end at MD: one that ends at P may have its push cut."""

    of: Workload

    def warm_up(self) -> Sequence[Conversation]:
        """None."""
        return []

    def conversations(self) -> Iterator[Conversation]:
        """What is to be warm, each with an answer of a few tokens."""
        for one in self.of.warm_up():
            yield replace(one, turns=tuple(replace(turn, max_tokens=4) for turn in one.turns))


@dataclass(slots=True)
class Bench:
    """A running system."""

    rig: Rig
    running: Cluster
    router: "router_pb2_grpc.RouterServiceAsyncStub"
    wan: "wan_pb2_grpc.WanServiceAsyncStub"

    def options(self, workload: Workload, arrival: Arrival, template: router_pb2.GenerateRequest) -> LoadOptions:
        """A load run against this system's router."""
        target = RouterTarget(self.running.router_address, template.SerializeToString())
        return LoadOptions(target, workload, arrival, warm_caches=False, timeout_s=TIMEOUT_S)

    async def run(
        self,
        workload: Workload,
        arrival: Arrival,
        template: router_pb2.GenerateRequest | None = None,
    ) -> Measured:
        """Warms caches, over the true link: senders measure it, and forget a faster one only slowly. Then measures."""
        options = self.options(workload, arrival, template or greedy())
        # Through P and MD, whatever the policy: the singular rule would keep one-token answers from MD's cache.
        warm = self.options(WarmUp(workload), ClosedLoop(1), greedy(router_pb2.PIPELINE_P_MD))
        async with options.target.open() as target, warm.target.open() as warm_target:
            run = LoadRun(options, target)
            warming = LoadRun(warm, warm_target)
            await warming.measure()
            errors = [record.error for record in warming.records if not record.ok]
            await self._quiet()
            if errors:
                raise InvalidRun(f"warm-up: {errors[0]}")
            before, cpu_before = await self._totals(), self._cpu_s()
            await run.measure()
            cores = (self._cpu_s() - cpu_before) / run.wall_s
            await self._quiet()
            after = await self._totals()
        steps, overrun, sent, busy = (b - a for a, b in zip(before, after, strict=True))
        failed = sum(not record.ok for record in run.records)
        health = Health(int(steps), int(overrun), failed, cores, os.getloadavg()[0])
        return Measured(run.records, run.wall_s, int(sent), busy, health)

    async def sent_bytes(self) -> int:
        """Bytes from site A to site B so far."""
        return (await self.wan.GetLink(wan_pb2.GetLinkRequest())).a_to_b_stats.bytes

    async def health(self) -> Health:
        """Steps so far, of all stages."""
        steps, overrun, _, _ = await self._totals()
        return Health(int(steps), int(overrun), load_average=os.getloadavg()[0])

    async def _quiet(self) -> None:
        """Until nothing crosses but pings: answers whose clients have gone are still being drained."""
        async with asyncio.timeout(60):
            seen = -(10**9)
            while (now := await self.sent_bytes()) - seen > 4000:
                seen = now
                await asyncio.sleep(0.5)

    async def _totals(self) -> tuple[float, float, float, float]:
        await asyncio.sleep(0.3)  # a load report is at most so old
        fleet = await self.router.GetFleet(router_pb2.GetFleetRequest())
        link = (await self.wan.GetLink(wan_pb2.GetLinkRequest())).a_to_b_stats
        loads = [stage.load for stage in fleet.stages]
        return sum(x.steps for x in loads), sum(x.steps_overrun for x in loads), link.bytes, link.busy_s

    def _cpu_s(self) -> float:
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in family)


def greedy(pipeline: int = 0, mode: int = 0) -> router_pb2.GenerateRequest:
    """Every request of an experiment: greedy, its whole length, ids only."""
    request = router_pb2.GenerateRequest(return_text=False)
    request.pipeline, request.handoff_mode = pipeline, mode  # type: ignore[assignment]
    request.sampling.CopyFrom(common_pb2.Sampling(temperature=0.0, ignore_eos=True))
    return request


@asynccontextmanager
async def bench(system: System, rig: Rig, logs: Path) -> AsyncIterator[Bench]:
    """The system's processes, while the block runs."""
    spec = system.cluster(rig, logs / system.name)
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(cluster(spec))
        router = await stack.enter_async_context(open_channel(running.router_address, Purpose.TOKENS))
        wan = await stack.enter_async_context(open_channel(running.wan_address, Purpose.CONTROL))
        yield Bench(rig, running, router_pb2_grpc.RouterServiceStub(router), wan_pb2_grpc.WanServiceStub(wan))
