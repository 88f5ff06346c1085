"""`python -m bench.router`: what the router costs, beside a bare forwarder and sglang-router; no models behind it."""

import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import uvloop

from bench.contest import tell
from bench.figures import Figure
from bench.index import spread
from bench.null_stages import BACKLOG, RELAYED_TOKENS
from bench.output import Report, arguments
from kvrelay.cli.ports import free_ports
from kvrelay.proto.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc, router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel
from kvrelay.types import LayoutFingerprint, LinkLoad, Role, StageDescription, StageLoad
from services.router.policies import Pdd
from services.router.route import Limits, Question, StageView

ABOUT = (
    "Null stages in another process answer at once: no model, no KV, loopback. Rates are tokens per CPU-second of the "
    "router's process, so of one full core. Intervals are the lowest and the highest of the runs."
)
PEER = Path(os.environ.get("KVRELAY_BENCH_SGLANG", "~/.cache/kvrelay-bench/sglang-router")).expanduser()
"""A virtual environment of its own: `python -m venv` and `pip install sglang-router` there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Declared before the run."""

    prompt_tokens: int = 512
    output_tokens: int = 8
    requests: int = 200
    """Of one run and system."""
    at_once: int = 4
    runs: int = 5
    streams: int = 16
    stream_tokens: int = 2000
    """Of each stream, one a message, as fast as they are taken."""
    paced_tokens: int = 500
    step_us: int = 8000
    """Of each stream, when it is paced: 2,000 messages a second, so the router sleeps between them."""
    backlog_tokens: int = 50_000
    """Of each of 4 streams, offered faster than they can be relayed."""
    backlog_rate: int = 100_000
    stages: int = 64
    """That the planner sees."""


QUICK = Plan(requests=40, runs=2, stream_tokens=200, paced_tokens=100, backlog_tokens=5000)


@dataclass(slots=True)
class Router:
    """Something that serves Generate."""

    stub: "router_pb2_grpc.RouterServiceAsyncStub"
    process: psutil.Process

    def cpu_s(self) -> float:
        """CPU time so far."""
        times = self.process.cpu_times()
        return float(times.user + times.system)


def request(
    plan: Plan, max_tokens: int, pace: int = 0, pipeline: int = router_pb2.PIPELINE_P_RLD_MD
) -> router_pb2.GenerateRequest:
    """Ids in, ids out."""
    return router_pb2.GenerateRequest(
        request_id=uuid.uuid4().hex,
        token_ids=router_pb2.TokenIds(ids=[7] * plan.prompt_tokens),
        sampling=common_pb2.Sampling(max_tokens=max_tokens, temperature=0, seed=pace, ignore_eos=True),
        pipeline=pipeline,  # type: ignore[arg-type]
        handoff_mode=router_pb2.HANDOFF_MODE_ONE_SHOT,
        return_text=False,
    )


async def answered(stub: Any, asked: router_pb2.GenerateRequest) -> tuple[float, int, int]:
    """-> (seconds to the first token, tokens, messages that carried them)."""
    began, first, tokens, messages = time.perf_counter(), 0.0, 0, 0
    async for reply in stub.Generate(asked, timeout=120):
        if reply.HasField("output"):
            first = first or time.perf_counter() - began
            tokens += len(reply.output.tokens.ids)
            messages += 1
    if tokens != asked.sampling.max_tokens:
        raise RuntimeError(f"{tokens} tokens came of {asked.sampling.max_tokens}")
    return first, tokens, messages


async def many(count: int, at_once: int, one: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Runs `one` so often, so many at once."""
    left, found = iter(range(count)), []

    async def work() -> None:
        for _ in left:
            found.append(await one())

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(work())
    return found


# --- what runs --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def program(*argv: str, quiet: bool = True) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child process; it is ended with the block."""
    silent = asyncio.subprocess.DEVNULL if quiet else None
    process = await asyncio.create_subprocess_exec(
        *argv, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=silent
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def null(stack: AsyncExitStack, *what: str) -> tuple[list[str], psutil.Process]:
    """-> (the addresses of something in bench.null_stages, its process)."""
    started = program(sys.executable, "-m", "bench.null_stages", *what)
    process = await stack.enter_async_context(started)
    assert process.stdout is not None
    ports = json.loads(await process.stdout.readline())
    return [f"127.0.0.1:{port}" for port in ports], psutil.Process(process.pid)


async def kvrelay_router(stack: AsyncExitStack, stages: Sequence[str]) -> Router:
    """The product's router, as its program runs, over these stages."""
    [port] = free_ports("127.0.0.1", 1)
    address = f"127.0.0.1:{port}"
    flags = ["--listen", address, "--model", "tiny", "--local-extend-tokens", "64"]
    flags += [part for stage in stages for part in ("--stages", stage)]
    process = await stack.enter_async_context(program(sys.executable, "-m", "services.router", *flags))
    channel = await stack.enter_async_context(open_channel(address, Purpose.TOKENS))
    stub = router_pb2_grpc.RouterServiceStub(channel)
    async with asyncio.timeout(30):
        while True:
            try:
                fleet = await stub.GetFleet(router_pb2.GetFleetRequest())
            except grpc.aio.AioRpcError:
                fleet = router_pb2.Fleet()
            if sum(stage.usable for stage in fleet.stages) == len(stages):
                break
            await asyncio.sleep(0.1)
    return Router(stub, psutil.Process(process.pid))


async def forwarder(stack: AsyncExitStack, stages: Sequence[str]) -> Router:
    """The bare one."""
    [address], process = await null(stack, "forwarder", *stages)
    channel = await stack.enter_async_context(open_channel(address, Purpose.TOKENS))
    return Router(router_pb2_grpc.RouterServiceStub(channel), process)


@dataclass(slots=True)
class HttpRouter:
    """sglang-router with a prefill and a decode worker."""

    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """CPU time so far, of all its processes."""
        every = [self.process, *self.process.children(recursive=True)]
        return float(sum(sum(process.cpu_times()[:2]) for process in every))

    async def ask(self, plan: Plan) -> float:
        """-> seconds to the first token."""
        return await http_stream(self.port, plan)


async def http_stream(port: int, plan: Plan) -> float:
    """One streamed /generate; -> seconds to its first event."""
    sampling = {"max_new_tokens": plan.output_tokens, "temperature": 0}
    body = json.dumps({"input_ids": [7] * plan.prompt_tokens, "sampling_params": sampling, "stream": True}).encode()
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /generate HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    first, events = 0.0, 0
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            events += 1
        if line.startswith(b"data: [DONE]"):
            break
    writer.close()
    if events != plan.output_tokens:
        raise RuntimeError(f"{events} events came of {plan.output_tokens}")
    return first


async def sglang_router(stack: AsyncExitStack) -> tuple[HttpRouter, int] | None:
    """-> (it, the port of its decode worker); None: not installed."""
    launcher = PEER / "bin" / "sglang-router"
    if not launcher.exists():
        return None
    workers, _ = await null(stack, "http")
    port, metrics = free_ports("127.0.0.1", 2)
    argv = ["launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    argv += ["--pd-disaggregation", "--prefill", f"http://{workers[0]}", "--decode", f"http://{workers[1]}"]
    argv += ["--policy", "round_robin", "--log-level", "error", "--disable-circuit-breaker"]
    process = await stack.enter_async_context(program(str(launcher), *argv))
    router = HttpRouter(port, psutil.Process(process.pid))
    try:
        async with asyncio.timeout(40):
            while True:
                try:
                    await router.ask(Plan())
                    return router, int(workers[1].rpartition(":")[2])
                except (OSError, RuntimeError):
                    await asyncio.sleep(0.3)
    except TimeoutError:
        tell("sglang-router did not serve within 40 s: left out")
        return None


# --- what is measured -------------------------------------------------------------------------------------------------


async def cpu_ms(router: Router | HttpRouter, plan: Plan) -> float:
    """CPU-milliseconds of one request."""
    before = router.cpu_s()
    if isinstance(router, Router):
        stub = router.stub
        await many(plan.requests, plan.at_once, lambda: answered(stub, request(plan, plan.output_tokens)))
    else:
        http = router
        await many(plan.requests, plan.at_once, lambda: http.ask(plan))
    return (router.cpu_s() - before) / plan.requests * 1e3


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


def planner_us(plan: Plan) -> float:
    """Microseconds of one decision, the median of many; half of the stages hold some of the prompt."""
    views = fleet_of(plan.stages)
    hits = {view.instance_id: 512 * n for n, view in enumerate(views) if n % 2}
    policy, limits, took = Pdd(), Limits(), []
    for turn in range(400):
        asked = Question(65536, 1024, views, hits, turn=turn)
        began = time.perf_counter()
        policy.choose(asked, limits)
        took.append((time.perf_counter() - began) * 1e6)
    return float(np.median(took))


async def measure(report: Report, plan: Plan) -> None:
    """Everything, interleaved."""
    async with AsyncExitStack() as stack:
        stages, _ = await null(stack, "stages")
        ours, bare = await kvrelay_router(stack, stages), await forwarder(stack, stages)
        peer = await sglang_router(stack)
        systems: dict[str, Router | HttpRouter] = {"forwarder": bare, "router": ours}
        if peer is not None:
            systems["sglang"] = peer[0]
        for system in systems.values():
            await cpu_ms(system, plan)
        runs: dict[str, list[float]] = {}
        for _ in range(plan.runs):
            for name, system in systems.items():
                runs.setdefault(f"{name}_cpu_ms", []).append(await cpu_ms(system, plan))
            for name, system in (("", ours), ("forwarder_", bare)):
                added = await added_ttft(system, stages[0], plan)
                runs.setdefault(f"{name}added_ttft_ms", []).append(float(np.median(added)))
            if peer is not None:
                pairs = [await peer[0].ask(plan) - await http_stream(peer[1], plan) for _ in range(30)]
                runs.setdefault("sglang_added_ttft_ms", []).append(float(np.median(pairs)) * 1e3)
            for name, system in (("", ours), ("forwarder_", bare)):
                rate, each = await relayed(system, plan, plan.streams, plan.stream_tokens, 0)
                runs.setdefault(f"{name}tokens_per_s", []).append(rate)
                runs.setdefault(f"{name}tokens_a_message", []).append(each)
                rate, _ = await relayed(system, plan, plan.streams, plan.paced_tokens, plan.step_us)
                runs.setdefault(f"{name}tokens_per_s_paced", []).append(rate)
            rate, each = await relayed(ours, plan, 4, plan.backlog_tokens, BACKLOG + plan.backlog_rate)
            runs.setdefault("tokens_per_s_coalesced", []).append(rate)
            runs.setdefault("tokens_a_message_coalesced", []).append(each)
            runs.setdefault("planner_us", []).append(planner_us(plan))
            tell(", ".join(f"{name} {values[-1]:,.2f}" for name, values in runs.items()))
    runs["router_cpu_vs_forwarder"] = [
        a / b for a, b in zip(runs["router_cpu_ms"], runs["forwarder_cpu_ms"], strict=True)
    ]
    targets = {
        "added_ttft_ms": "<= 3",
        "router_cpu_vs_forwarder": "<= 1.5",
        "tokens_per_s": ">= 6000",
        "tokens_per_s_coalesced": ">= 50000",
        "planner_us": "<= 150",
    }
    for name in [*targets, *(name for name in runs if name not in targets)]:
        report.figures[name] = spread(runs[name], targets.get(name, ""))


def fleet_needs(figures: dict[str, Figure], stages: int = 100) -> str:
    """A line for whoever sizes a fleet: half of the stages decode 64 sequences in steps of 25 ms, answers of 1,000."""
    tokens_per_s = stages / 2 * 64 / 0.025
    per_token = 1 / figures["tokens_per_s"].value
    per_request = figures["router_cpu_ms"].value / 1e3 - 8 * per_token
    cores = tokens_per_s * per_token + tokens_per_s / 1000 * per_request
    shared = tokens_per_s / figures["tokens_per_s_coalesced"].value + tokens_per_s / 1000 * per_request
    return (
        f"{stages} stages, half of them decoding 64 sequences in steps of 25 ms: {tokens_per_s:,.0f} tokens/s and "
        f"{tokens_per_s / 1000:,.0f} answers of 1,000 tokens a second need {cores:.1f} cores of routers with a message "
        f"a token; under backlog tokens share messages and {shared:.1f} do."
    )


async def router(plan: Plan, *, quick: bool) -> Report:
    """All of it."""
    report = Report("router", quick, asdict(plan) | {"relayed_tokens": RELAYED_TOKENS}, emulated=ABOUT)
    await measure(report, plan)
    line = fleet_needs(report.figures)
    report.emulated = f"{ABOUT}\n{line}"
    report.data["fleet"] = line
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
