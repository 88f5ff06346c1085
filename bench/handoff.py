"""`python -m bench.handoff`: what a hand-off costs. Ids against KV over the same WAN, modes, and MD's other streams."""

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import uvloop

from bench.contest import tell
from bench.figures import Figure
from bench.lab import VOCAB_SIZE, Bench, Health, bench, greedy
from bench.output import Report, arguments, curves
from bench.rig import PDD, Rig
from bench.wan import flood, sink
from kvrelay.cli import ready
from kvrelay.load.arrival import ClosedLoop
from kvrelay.load.groups import PrefixGroups
from kvrelay.load.lengths import Lengths
from kvrelay.load.record import Record
from kvrelay.load.run import LoadRun
from kvrelay.proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, router_pb2, wan_pb2
from kvrelay.rpc.channels import Purpose, open_channel
from kvrelay.rpc.sampling import sampling_to_proto
from kvrelay.types import Sampling

MODES = {"one-shot": 2, "catch-up": 3, "dynamic": 1}


@dataclass(frozen=True, slots=True)
class Plan:
    """Declared before the run."""

    tokens: tuple[int, ...] = (1, 16, 64, 128, 256, 512)
    """Handed over."""
    repeats: int = 12
    prompt_tokens: int = 512
    relayed: int = 24
    """Requests of each mode."""
    background: int = 3
    """Other streams at MD meanwhile."""
    most_in_flight: int = 2
    wan_rate_bytes_per_s: float = 240_000.0
    """For the ids-against-KV part and the modes."""


QUICK = Plan(tokens=(1, 64, 256), repeats=4, relayed=8)


@dataclass(slots=True)
class Pair:
    """P and MD, dialled as the router does: MD across the WAN."""

    bench: Bench
    prefill: "prefill_pb2_grpc.PrefillServiceAsyncStub"
    main: "decode_pb2_grpc.DecodeServiceAsyncStub"
    main_info: Any
    prefill_epoch: int
    chance: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def ids(self, count: int) -> list[int]:
        """Random ids."""
        return [int(i) for i in self.chance.integers(1, 230, count)]

    async def by_ids(self, prompt: list[int], eager: list[int]) -> tuple[float, int]:
        """MD holds the prompt; (ms from Resume{eager} to its next token, bytes that crossed to MD for it)."""
        async with self._leg(prompt, local=True) as (call, _):
            await _until(call, "ready")
            before, began = await self.bench.sent_bytes(), time.perf_counter()
            await call.write(decode_pb2.DecodeRequest(resume=decode_pb2.Resume(first_index=0, ids=eager)))
            await _until(call, "tokens")
            took_ms = (time.perf_counter() - began) * 1e3
            return took_ms, await self.bench.sent_bytes() - before

    async def by_kv(self, prompt: list[int], eager: list[int]) -> tuple[float, int]:
        """The same, but the eager tokens' KV is shipped: P, which holds it, pushes what MD lacks."""
        every = [*prompt, *eager]
        await self._push(every, [])
        async with self._leg(every, local=False) as (call, transfer_id):
            await _until(call, "opened")
            target = prefill_pb2.PushTarget(
                instance_id=self.main_info.instance_id,
                address=self.main_info.address,
                epoch=self.main_info.epoch,
                transfer_id=transfer_id,
                role=common_pb2.ROLE_MAIN,
            )
            before, began = await self.bench.sent_bytes(), time.perf_counter()
            await call.write(decode_pb2.DecodeRequest(resume=decode_pb2.Resume(first_index=0, ids=[7])))
            pushing = asyncio.ensure_future(self._push(every, [target]))
            await _until(call, "tokens")
            took_ms = (time.perf_counter() - began) * 1e3
            sent = await self.bench.sent_bytes() - before
            await pushing
            return took_ms, sent

    async def _push(self, prompt: list[int], targets: list[Any]) -> None:
        request = prefill_pb2.PrefillRequest(
            request_id=uuid.uuid4().hex,
            prompt_ids=prompt,
            sampling=_sampling(),
            targets=targets,
            epoch=self.prefill_epoch,
            kv_only=True,
        )
        async for _ in self.prefill.Prefill(request):
            pass

    @asynccontextmanager
    async def _leg(self, prompt: list[int], *, local: bool) -> AsyncIterator[tuple[Any, str]]:
        transfer_id = "" if local else uuid.uuid4().hex
        call: Any = self.main.Decode()
        opening = decode_pb2.OpenLeg(
            request_id=uuid.uuid4().hex,
            transfer_id=transfer_id,
            prompt_ids=prompt,
            sampling=_sampling(),
            epoch=self.main_info.epoch,
            local_prefill=local,
        )
        try:
            await call.write(decode_pb2.DecodeRequest(open=opening))
            yield call, transfer_id
        finally:
            call.cancel()


def _sampling() -> common_pb2.Sampling:
    return sampling_to_proto(Sampling(seed=1, max_tokens=1024, temperature=0.0, ignore_eos=True))


async def _until(call: Any, kind: str) -> None:
    async for event in call:
        if event.WhichOneof("event") == kind:
            return
    raise ConnectionError(f"the leg ended before {kind}")


@asynccontextmanager
async def pair(running: Bench) -> AsyncIterator[Pair]:
    """Both stages' stubs."""
    at = running.running.at
    far = await ready.mapped(at.wan, at.stages["main-1"], "b")
    fleet = await running.router.GetFleet(router_pb2.GetFleetRequest())
    info = {stage.info.instance_id: stage.info for stage in fleet.stages}
    async with AsyncExitStack() as stack:
        near = await stack.enter_async_context(open_channel(at.stages["prefill-1"], Purpose.TOKENS))
        across = await stack.enter_async_context(open_channel(far, Purpose.TOKENS))
        prefill, main = prefill_pb2_grpc.PrefillServiceStub(near), decode_pb2_grpc.DecodeServiceStub(across)
        yield Pair(running, prefill, main, info["main-1"], info["prefill-1"].epoch)


@asynccontextmanager
async def congestion(running: Bench, on: bool) -> AsyncIterator[None]:
    """One greedy TCP connection from site A to site B beside everything else."""
    if not on:
        yield
        return
    async with sink() as address:
        mapped = await running.wan.MapTarget(wan_pb2.MapTargetRequest(target=address, target_site="b"))
        flooding = asyncio.ensure_future(flood(mapped.address))
        try:
            yield
        finally:
            flooding.cancel()
            await asyncio.gather(flooding, return_exceptions=True)


async def ids_against_kv(report: Report, running: Bench, plan: Plan, out: Path) -> None:
    """Payload and stall of both ways, idle and congested."""
    rows: list[list[str]] = []
    means: dict[str, list[float]] = {}
    per_token: list[float] = []
    async with pair(running) as stages:
        for link in ("idle", "congested"):
            async with congestion(running, link == "congested"):
                for tokens in plan.tokens:
                    for way in ("ids", "kv"):
                        got = []
                        for _ in range(plan.repeats):
                            prompt, eager = stages.ids(plan.prompt_tokens), stages.ids(tokens)
                            if way == "kv":
                                await stages.by_ids(prompt, [7])  # MD holds the prompt's KV
                            got.append(await (stages.by_ids if way == "ids" else stages.by_kv)(prompt, eager))
                        ms, sent = np.array([g[0] for g in got]), float(np.median([g[1] for g in got]))
                        means.setdefault(f"{way}, {link}", []).append(float(ms.mean()))
                        if link == "idle" and way == "ids" and tokens >= 64:
                            per_token.append(sent / tokens)
                        size = f"{sent:,.0f}" if link == "idle" else "(with the flood's)"
                        rows.append(
                            [
                                way,
                                link,
                                str(tokens),
                                size,
                                f"{ms.mean():.0f}",
                                f"{np.percentile(ms, 99):.0f}",
                                f"{ms.std():.1f}",
                            ]
                        )
    columns = ["handed over", "link", "tokens", "bytes A to B", "mean ms", "P99", "std"]
    report.tables.append(("ids against KV: until MD's next token", columns, rows))
    report.figures["bytes_per_token"] = Figure(max(per_token), target="<= 6")
    series = {name: (list(plan.tokens), ys) for name, ys in means.items()}
    report.pictures.append(
        curves(out / "handoff-ids-kv.png", series, "tokens", "mean ms until MD's next token", log=True)
    )
    report.data["ids_against_kv"] = rows


async def modes(report: Report, running: Bench, plan: Plan) -> None:
    """Hand-off stall of relayed requests by mode, and the gaps of MD's other streams during extends and without."""
    rows, ratios, worst = [], [], 0.0
    for mode, number in MODES.items():
        relayed, others, health = await _with_background(running, plan, number)
        report.invalid += [f"{mode}: {why}"] if (why := health.why_not()) else []
        stalls = [r.handoff_stall_ms for r in relayed if r.handoff_stall_ms is not None]
        during, without = gaps_by_extend(relayed, others)
        p99 = float(np.percentile(stalls, 99)) if stalls else float("nan")
        ratio = float(np.percentile(during, 99) / np.percentile(without, 99)) if during and without else float("nan")
        ratios.append(ratio)
        worst = max(worst, p99 / running.rig.bound_ms)
        ids = np.median([r.tokens("relay") for r in relayed]) if relayed else 0
        rows.append(
            [
                mode,
                str(len(stalls)),
                f"{ids:.0f}",
                f"{np.mean(stalls or [0]):.0f}",
                f"{p99:.0f}",
                f"{np.std(stalls or [0]):.1f}",
                f"{p99 / running.rig.bound_ms:.2f}",
                f"{ratio:.2f}",
            ]
        )
        report.data[mode] = {"stall_ms": stalls, "gaps_during": during, "health": asdict(health)}
    columns = ["mode", "hand-offs", "relay tokens", "stall mean ms", "P99", "std", "P99 / bound", "MD's ITL P99 ratio"]
    report.tables.append(("hand-off modes", columns, rows))
    report.figures["stall_p99_over_bound"] = Figure(worst, target="<= 1")
    report.figures["main_itl_p99_ratio"] = Figure(max(ratios), target="<= 1.5")


async def _with_background(running: Bench, plan: Plan, mode: int) -> tuple[list[Record], list[Record], Health]:
    """Relayed requests beside long streams at MD, on one clock."""
    length = Lengths(plan.prompt_tokens, 2 * plan.prompt_tokens)
    few = PrefixGroups(mode, VOCAB_SIZE, plan.relayed, length, Lengths(96, 160))
    many = PrefixGroups(mode + 10, VOCAB_SIZE, None, Lengths(48, 48), Lengths(200, 200))
    relayed = running.options(few, ClosedLoop(plan.most_in_flight), greedy(router_pb2.PIPELINE_P_RLD_MD, mode))
    others = running.options(many, ClosedLoop(plan.background), greedy(router_pb2.PIPELINE_MD))
    before = await running.health()
    begins_at = time.time() + 0.5
    async with relayed.target.open() as target, others.target.open() as other_target:
        mine, theirs = LoadRun(relayed, target), LoadRun(others, other_target)
        background = asyncio.ensure_future(theirs.measure(begins_at))
        try:
            await mine.measure(begins_at)
        finally:
            background.cancel()
            await asyncio.gather(background, return_exceptions=True)
    after = await running.health()
    failed = sum(not r.ok for r in mine.records)
    health = Health(after.steps - before.steps, after.overrun - before.overrun, failed, load_average=after.load_average)
    return [r for r in mine.records if r.ok], [r for r in theirs.records if r.ok], health


def gaps_by_extend(relayed: list[Record], others: list[Record]) -> tuple[list[float], list[float]]:
    """Gaps (ms) of MD's other streams that overlap an extend, and the rest. An extend: from MD's Ready to its token."""
    spans = []
    for r in relayed:
        ready_ms = next((at for name, at in r.timeline if name == "main_ready"), None)
        if ready_ms is not None and "rm" in r.sources:
            spans.append((r.sent_s * 1e3 + ready_ms, r.sent_s * 1e3 + r.arrived_ms[r.sources.index("m")]))
    during: list[float] = []
    without: list[float] = []
    for r in others:
        for before, after in zip(r.arrived_ms, r.arrived_ms[1:], strict=False):
            start, end = r.sent_s * 1e3 + before, r.sent_s * 1e3 + after
            (during if any(a < end and start < b for a, b in spans) else without).append(end - start)
    return during, without


async def handoff(plan: Plan, rig: Rig, out: Path, *, quick: bool) -> Report:
    """All of it, on one running topology."""
    report = Report("handoff", quick, {**asdict(plan), **asdict(rig), "bound_ms": rig.bound_ms})
    async with bench(PDD, rig, Path(mkdtemp(prefix="kvrelay-bench-"))) as running:
        tell("hand-off: ids against KV")
        await ids_against_kv(report, running, plan, out)
        tell("hand-off: modes")
        await modes(report, running, plan)
    return report


def main() -> None:
    """Exit code 1: the run is invalid."""
    wanted = arguments(__doc__).parse_args()
    wanted.out.mkdir(parents=True, exist_ok=True)
    plan = QUICK if wanted.quick else Plan()
    rig = Rig(wan_rate_bytes_per_s=plan.wan_rate_bytes_per_s)
    report = uvloop.run(handoff(plan, rig, wanted.out, quick=wanted.quick))
    sys.exit(report.finish(wanted.out))


if __name__ == "__main__":
    main()
