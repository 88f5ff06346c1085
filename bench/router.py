"""`python -m bench.router`: what the router costs, beside a bare forwarder and sglang-router; no models behind it."""

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict

import numpy as np
import uvloop

from bench.contest import tell
from bench.figures import Figure
from bench.index import spread
from bench.null_stages import BACKLOG, RELAYED_TOKENS
from bench.output import Report, arguments
from bench.router_fleet import REPORTS_S, FleetSeen, fleet_seen, planner_us
from bench.router_systems import (
    HttpRouter,
    Plan,
    Router,
    answered,
    forwarder,
    http_stream,
    kvrelay_router,
    many,
    null,
    request,
    sglang_router,
)
from kvrelay.grpc_core import WITHOUT_EVENT_ENGINE
from kvrelay.proto.v1 import prefill_pb2, prefill_pb2_grpc, router_pb2
from kvrelay.rpc.channels import Purpose, open_channel

ABOUT = (
    "Null stages in another process answer at once: no model, no KV, loopback. Rates are tokens per CPU-second of the "
    "router's process, so of one full core. Intervals are the lowest and the highest of the runs. The forwarder is "
    'bare grpc.aio; the one "in place" has gRPC\'s event engine switched off, as the router has (kvrelay/grpc_core.py).'
)
QUICK = Plan(requests=120, runs=3, stream_tokens=200, paced_tokens=100, backlog_tokens=5000, fleet=9, fleet_seconds=1.0)


async def cpu_ms(systems: Mapping[str, Router | HttpRouter], plan: Plan) -> dict[str, float]:
    """CPU-milliseconds of one request at each. They take turns: a busy moment of the machine is nobody's own."""
    took, requests = dict.fromkeys(systems, 0.0), plan.requests // plan.turns
    for _ in range(plan.turns):
        for name, router in systems.items():
            before = router.cpu_s()
            if isinstance(router, Router):
                stub = router.stub
                await many(requests, plan.at_once, lambda s=stub: answered(s, request(plan, plan.output_tokens)))
            else:
                await many(requests, plan.at_once, lambda h=router: h.ask(plan))
            took[name] += router.cpu_s() - before
    return {name: seconds / (requests * plan.turns) * 1e3 for name, seconds in took.items()}


async def added_ttft(router: Router, prefill: str, plan: Plan) -> list[float]:
    """Milliseconds of each of some pairs: through the router less straight from the prefill stage."""
    async with open_channel(prefill, Purpose.TOKENS) as channel:
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        added = []
        for _ in range(max(20, plan.requests // 2)):
            through, _, _ = await answered(router.stub, request(plan, plan.output_tokens))
            asked = request(plan, plan.output_tokens)
            direct = prefill_pb2.PrefillRequest(
                request_id=asked.request_id, prompt_ids=asked.token_ids.ids, sampling=asked.sampling, epoch=1
            )
            began, first = time.perf_counter(), 0.0
            async for _event in stub.Prefill(direct):
                first = first or time.perf_counter() - began
            added.append((through - first) * 1e3)
    return added


async def relayed(router: Router, plan: Plan, streams: int, tokens: int, pace: int) -> tuple[float, float]:
    """-> (tokens per CPU-second, tokens a message to the client) of some long answers at once."""
    before = router.cpu_s()
    asked = [request(plan, tokens, pace, router_pb2.PIPELINE_MD) for _ in range(streams)]
    found = await asyncio.gather(*(answered(router.stub, one) for one in asked))
    total = sum(count for _, count, _ in found)
    return total / (router.cpu_s() - before), total / sum(messages for _, _, messages in found)


async def one_run(plan: Plan) -> dict[str, float]:
    """Every figure once, its systems started for it: a process has a luck of 10-20 % that it keeps as long as it lives.

    Of sglang-router only where it is installed.
    """
    async with AsyncExitStack() as stack:
        stages, _ = await null(stack, "stages")
        ours, bare = await kvrelay_router(stack, stages), await forwarder(stack, stages)
        peer = await sglang_router(stack)
        in_place = await forwarder(stack, stages, GRPC_EXPERIMENTS=WITHOUT_EVENT_ENGINE)
        systems: dict[str, Router | HttpRouter] = {"forwarder": bare, "router": ours, "forwarder_in_place": in_place}
        if peer is not None:
            systems["sglang"] = peer[0]
        await cpu_ms(systems, plan)
        found = {f"{name}_cpu_ms": each for name, each in (await cpu_ms(systems, plan)).items()}
        for name in ("forwarder", "forwarder_in_place"):
            found[f"router_cpu_vs_{name}"] = found["router_cpu_ms"] / found[f"{name}_cpu_ms"]
        for name, system in (("", ours), ("forwarder_", bare)):
            found[f"{name}added_ttft_ms"] = float(np.median(await added_ttft(system, stages[0], plan)))
        if peer is not None:
            pairs = [await peer[0].ask(plan) - await http_stream(peer[1], plan) for _ in range(30)]
            found["sglang_added_ttft_ms"] = float(np.median(pairs)) * 1e3
        for name, system in (("", ours), ("forwarder_", bare)):
            rate, each = await relayed(system, plan, plan.streams, plan.stream_tokens, 0)
            found[f"{name}tokens_per_s"], found[f"{name}tokens_a_message"] = rate, each
            rate, _ = await relayed(system, plan, plan.streams, plan.paced_tokens, plan.step_us)
            found[f"{name}tokens_per_s_paced"] = rate
        rate, _ = await relayed(in_place, plan, plan.streams, plan.stream_tokens, 0)
        found["forwarder_in_place_tokens_per_s"] = rate
        rate, each = await relayed(ours, plan, 4, plan.backlog_tokens, BACKLOG + plan.backlog_rate)
        found["tokens_per_s_coalesced"], found["tokens_a_message_coalesced"] = rate, each
    return found | {"planner_us": planner_us(plan.stages)}


async def measure(report: Report, plan: Plan) -> None:
    """All runs."""
    runs: dict[str, list[float]] = {}
    for _ in range(plan.runs):
        for name, value in (await one_run(plan)).items():
            runs.setdefault(name, []).append(value)
        tell(", ".join(f"{name} {values[-1]:,.2f}" for name, values in runs.items()))
    targets = {
        "added_ttft_ms": "<= 3",
        "router_cpu_vs_forwarder": "<= 1.5",
        "tokens_per_s": ">= 6000",
        "tokens_per_s_coalesced": ">= 50000",
        "planner_us": "<= 150",
    }
    for name in [*targets, *(name for name in runs if name not in targets)]:
        report.figures[name] = spread(runs[name], targets.get(name, ""))


def fleet_needs(figures: dict[str, Figure], seen: FleetSeen, stages: int = 100) -> str:
    """Lines for whoever sizes a fleet: half of the stages decode 64 sequences in steps of 25 ms, answers of 1,000."""
    tokens_per_s = stages / 2 * 64 / 0.025
    per_token = 1 / figures["tokens_per_s"].value
    per_request = figures["router_cpu_ms"].value / 1e3 - 8 * per_token
    cores = tokens_per_s * per_token + tokens_per_s / 1000 * per_request
    shared = tokens_per_s / figures["tokens_per_s_coalesced"].value + tokens_per_s / 1000 * per_request
    reports, answers = stages / REPORTS_S, stages // 2 * 64
    return (
        f"{stages} stages, half of them decoding 64 sequences in steps of 25 ms: {tokens_per_s:,.0f} tokens/s and "
        f"{tokens_per_s / 1000:,.0f} answers of 1,000 tokens a second need {cores:.1f} cores of routers with a message "
        f"a token; under backlog tokens share messages and {shared:.1f} do. While all of them work each router hears "
        f"{reports:,.0f} load reports a second: {reports * seen.report_us / 1e6:.2f} of a core "
        f"({seen.report_us:.0f} us each, seen with {seen.stages} stages). A decision takes "
        f"{planner_us(stages):.0f} us. {seen.stages} stages joined within "
        f"{seen.join_s:.1f} s of the router's start; it holds {seen.resident_mb:.0f} MB, and {seen.stream_kb:.0f} kB "
        f"for each answer under way ({answers} of them: {answers * seen.stream_kb / 1e3:.0f} MB)."
    )


async def router(plan: Plan, *, quick: bool) -> Report:
    """All of it."""
    report = Report("router", quick, asdict(plan) | {"relayed_tokens": RELAYED_TOKENS}, emulated=ABOUT)
    await measure(report, plan)
    seen = await fleet_seen(plan.fleet, plan.fleet_streams, plan.fleet_seconds)
    line = fleet_needs(report.figures, seen)
    report.emulated = f"{ABOUT}\n{line}"
    report.data |= {"fleet": line, "fleet_seen": asdict(seen)}
    return report


def main() -> None:
    """The last line is one JSON object."""
    wanted = arguments(__doc__).parse_args()
    report = uvloop.run(router(QUICK if wanted.quick else Plan(), quick=wanted.quick))
    code = report.finish(wanted.out)
    print(json.dumps({name: figure.value for name, figure in report.figures.items()}))
    sys.exit(code)


if __name__ == "__main__":
    main()
