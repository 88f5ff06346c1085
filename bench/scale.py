"""`python -m bench.scale`: 1 to 8 paced stages of each role on one host: what grows, what fills first, the cost."""

import json
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import psutil
import uvloop

from bench.contest import tell
from bench.cpu import family_cpu_s
from bench.figures import Figure
from bench.lab import VOCAB_SIZE, greedy
from bench.output import Report, arguments, curves
from kvrelay.cli.cluster import Cluster, cluster
from kvrelay.cli.spec import ClusterSpec
from kvrelay.load.arrival import ClosedLoop
from kvrelay.load.hits import HitRates, SharedPrefixes
from kvrelay.load.lengths import Lengths
from kvrelay.load.run import LoadOptions, LoadRun
from kvrelay.load.target import RouterTarget
from kvrelay.proto.v1 import router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel

ABOUT = (
    "Paced engines (emulated accelerators; real maths of a tiny model) and an emulated WAN (no loss, no congestion "
    "control), on one host: the stages, the router, Redis, the emulator and the client share its cores. CPU is of "
    "whole processes, so a stage's includes its tiny model's maths; a step that overran its pace means a full core."
)


@dataclass(frozen=True, slots=True)
class Plan:
    """Declared before the run."""

    stages: tuple[int, ...] = (1, 2, 4, 8)
    """Of each role."""
    seconds: float = 7.0
    """Measured, after as many of warm-up as an answer takes."""
    pace: str = "fixed=50,token=0.1"
    decode_slots: int = 4
    """Of each relay and each main stage: they fill before the host does."""
    prompt_tokens: int = 256
    output_tokens: int = 48
    hits: str = "0.9"
    wan_delay_ms: float = 5.0


QUICK = Plan(stages=(1, 2), seconds=5.0)


@dataclass(frozen=True, slots=True)
class Seen:
    """One fleet under a load that keeps its decode slots full."""

    stages: int
    requests_per_s: float
    tokens_per_s: float
    cores: dict[str, float]
    """By part."""
    fullest: dict[str, float]
    """By part: the busiest of its processes, in cores."""
    overrun: float
    """Share of the paced steps that took longer."""

    @property
    def all_cores(self) -> float:
        """Used by everything."""
        return sum(self.cores.values())

    def us_per_token(self, part: str) -> float:
        """CPU-microseconds of a part for each output token."""
        return self.cores[part] / self.tokens_per_s * 1e6

    def us_per_request(self, part: str) -> float:
        """CPU-microseconds of a part for each request."""
        return self.cores[part] / self.requests_per_s * 1e6


def spec(plan: Plan, stages: int, logs: Path) -> ClusterSpec:
    """So many of each role; the link is no limit."""
    slots = str(plan.decode_slots)
    return ClusterSpec(
        model="tiny",
        prefill=stages,
        relay=stages,
        main=stages,
        wan_rate="0",
        wan_delay_ms=plan.wan_delay_ms,
        pace=plan.pace,
        threads=1,
        router_port=0,
        pool_tokens=16384,
        stage_set=(("max_waiting", "256"), ("main.max_running", slots), ("relay.max_running", slots)),
        log_dir=logs,
    )


def cpu_s(running: Cluster) -> dict[str, float]:
    """CPU time so far, by process; "client" is this one."""
    return {"client": time.process_time()} | {
        name: family_cpu_s(process.pid) for name, process in running.processes.items()
    }


def part_of(process: str) -> str:
    """ "main-3" -> "main"."""
    return process.rstrip("0123456789").rstrip("-")


async def steps(router: Any) -> tuple[int, int]:
    """(all, overrun) of the fleet so far."""
    loads = [stage.load for stage in (await router.GetFleet(router_pb2.GetFleetRequest())).stages]
    return sum(load.steps for load in loads), sum(load.steps_overrun for load in loads)


async def load(running: Cluster, plan: Plan, stages: int, seconds: float, seed: int) -> LoadRun:
    """As many clients as there are decode slots at main stages, and a half more."""
    workload = SharedPrefixes(
        seed=seed,
        vocab_size=VOCAB_SIZE,
        count=None,
        hits=HitRates.parse(plan.hits),
        prompt_tokens=Lengths(plan.prompt_tokens, plan.prompt_tokens),
        output_tokens=Lengths(plan.output_tokens, plan.output_tokens),
        documents=2 * stages,
    )
    target = RouterTarget(running.router_address, greedy(router_pb2.PIPELINE_P_RLD_MD).SerializeToString())
    clients = ClosedLoop(plan.decode_slots * stages * 3 // 2)
    options = LoadOptions(target, workload, clients, warm_caches=True, duration_s=seconds, timeout_s=120.0)
    async with target.open() as opened:
        run = LoadRun(options, opened)
        await run.warm_up()
        await run.measure()
    return run


async def measured(plan: Plan, stages: int, logs: Path) -> Seen:
    """One fleet, from its start to its end."""
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(cluster(spec(plan, stages, logs)))
        channel = await stack.enter_async_context(open_channel(running.router_address, Purpose.CONTROL))
        router = router_pb2_grpc.RouterServiceStub(channel)
        await load(running, plan, stages, 2.0, seed=0)
        before, (made, late) = cpu_s(running), await steps(router)
        run = await load(running, plan, stages, plan.seconds, seed=1)
        after, (made_then, late_then) = cpu_s(running), await steps(router)
    failed = [record.error for record in run.records if not record.ok]
    if failed:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    cores: dict[str, float] = {}
    fullest: dict[str, float] = {}
    for process, used in after.items():
        share = (used - before[process]) / run.wall_s
        part = part_of(process)
        cores[part] = cores.get(part, 0.0) + share
        fullest[part] = max(fullest.get(part, 0.0), share)
    tokens = sum(record.output_tokens for record in run.records)
    overrun = (late_then - late) / max(1, made_then - made)
    return Seen(stages, len(run.records) / run.wall_s, tokens / run.wall_s, cores, fullest, overrun)


def tell_all(report: Report, found: list[Seen], out: Path) -> None:
    """Figures, tables, a picture, and a line on what fills first."""
    first, last = found[0], found[-1]
    for seen in found:
        growth = seen.tokens_per_s / first.tokens_per_s / (seen.stages / first.stages)
        report.figures[f"growth_{seen.stages}"] = Figure(growth)
        report.figures[f"tokens_per_s_{seen.stages}"] = Figure(seen.tokens_per_s)
    parts = sorted(last.cores, key=lambda part: -last.cores[part])
    rows = [
        [
            str(seen.stages),
            f"{seen.requests_per_s:.2f}",
            f"{seen.tokens_per_s:.0f}",
            f"{seen.all_cores:.2f}",
            f"{seen.overrun:.1%}",
            *(f"{seen.cores[part]:.2f}" for part in parts),
        ]
        for seen in found
    ]
    columns = ["stages of each role", "requests/s", "tokens/s", "cores", "steps overran", *parts]
    report.tables.append(("cores by part", columns, rows))
    rows = [[part, *(f"{s.us_per_request(part):,.0f} / {s.us_per_token(part):,.0f}" for s in found)] for part in parts]
    titles = ["part", *(f"{seen.stages}: CPU-us a request / a token" for seen in found)]
    report.tables.append(("cost by part, all of a part's work divided by requests, and by tokens", titles, rows))
    for part in parts:
        report.figures[f"{part}_us_per_token"] = Figure(last.us_per_token(part))
    report.data["fleets"] = [asdict(seen) for seen in found]
    ideal = [first.tokens_per_s * seen.stages / first.stages for seen in found]
    sizes = [float(seen.stages) for seen in found]
    series = {"measured": (sizes, [seen.tokens_per_s for seen in found]), "one fleet's, multiplied": (sizes, ideal)}
    path = out / "scale.png"
    report.pictures.append(curves(path, series, "stages of each role", "output tokens/s", title="paced, one host"))
    alone = {part: seconds for part, seconds in last.fullest.items() if part not in ("client",)}
    busiest = max(alone, key=lambda part: alone[part])
    line = (
        f"At {last.stages} of each role the host's {psutil.cpu_count()} cores give {last.all_cores:.2f}; the busiest "
        f"process is {busiest} ({alone[busiest]:.2f} of a core), the largest part {parts[0]} "
        f"({last.cores[parts[0]]:.2f} cores). "
        f"One router core would carry {1e6 / last.us_per_token('router'):,.0f} tokens/s of such answers."
    )
    report.data["fills_first"] = line
    report.emulated = f"{ABOUT}\n{line}"


async def scale(plan: Plan, out: Path, *, quick: bool) -> Report:
    """Every fleet size."""
    report = Report("scale", quick, asdict(plan), emulated=ABOUT)
    found = []
    for stages in plan.stages:
        logs = Path(mkdtemp(prefix="kvrelay-bench-"))
        seen = await measured(plan, stages, logs)
        found.append(seen)
        used = ", ".join(f"{part} {share:.2f}" for part, share in seen.cores.items())
        tell(f"{stages} of each: {seen.tokens_per_s:.0f} tokens/s, {seen.overrun:.1%} steps overran; cores: {used}")
    tell_all(report, found, out)
    return report


def main() -> None:
    """The last line is one JSON object."""
    wanted = arguments(__doc__).parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    report = uvloop.run(scale(QUICK if wanted.quick else Plan(), wanted.out, quick=wanted.quick))
    code = report.finish(wanted.out)
    print(json.dumps({name: figure.value for name, figure in report.figures.items()}))
    sys.exit(code)


if __name__ == "__main__":
    main()
