"""What bench.router measures: the product's router, a bare forwarder, sglang-router, and how each is asked."""

import asyncio
import json
import os
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.contest import tell
from bench.cpu import cpu_s, family_cpu_s
from kvrelay.cli.ports import free_ports
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel

PEER = Path(os.environ.get("KVRELAY_BENCH_SGLANG", "~/.cache/kvrelay-bench/sglang-router")).expanduser()
"""A virtual environment of its own: `python -m venv` and `pip install sglang-router` there."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Declared before the run."""

    prompt_tokens: int = 512
    output_tokens: int = 8
    requests: int = 150
    """Of one run and system."""
    turns: int = 5
    """In which the systems share a run's requests."""
    at_once: int = 8
    runs: int = 5
    streams: int = 16
    stream_tokens: int = 1000
    """Of each stream, one a message, as fast as they are taken."""
    paced_tokens: int = 300
    step_us: int = 8000
    """Of each stream, when it is paced: 2,000 messages a second, so the router sleeps between them."""
    backlog_tokens: int = 50_000
    """Of each of 4 streams, offered faster than they can be relayed."""
    backlog_rate: int = 100_000
    stages: int = 64
    """That the planner sees."""
    fleet: int = 100
    """Null stages of the router whose fleet is looked at."""
    fleet_streams: int = 200
    """Answers under way at it, to see what memory each takes."""
    fleet_seconds: float = 5.0


@dataclass(slots=True)
class Router:
    """Something that serves Generate."""

    stub: "router_pb2_grpc.RouterServiceAsyncStub"
    pid: int

    def cpu_s(self) -> float:
        """CPU time so far."""
        return cpu_s(self.pid)


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
async def program(*argv: str, quiet: bool = True, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child process, with this environment and more; it is ended with the block."""
    silent = asyncio.subprocess.DEVNULL if quiet else None
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=silent,
        env=os.environ | environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def null(stack: AsyncExitStack, *what: str, **environment: str) -> tuple[list[str], int]:
    """-> (the addresses of something in bench.null_stages, its process id)."""
    started = program(sys.executable, "-m", "bench.null_stages", *what, **environment)
    process = await stack.enter_async_context(started)
    assert process.stdout is not None
    ports = json.loads(await process.stdout.readline())
    return [f"127.0.0.1:{port}" for port in ports], process.pid


async def kvrelay_router(stack: AsyncExitStack, stages: Sequence[str]) -> Router:
    """The product's router, as its program runs, over these stages; it returns when all of them are usable."""
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
    return Router(stub, process.pid)


async def forwarder(stack: AsyncExitStack, stages: Sequence[str], **environment: str) -> Router:
    """The bare one."""
    [address], pid = await null(stack, "forwarder", *stages, **environment)
    channel = await stack.enter_async_context(open_channel(address, Purpose.TOKENS))
    return Router(router_pb2_grpc.RouterServiceStub(channel), pid)


@dataclass(slots=True)
class HttpRouter:
    """sglang-router with a prefill and a decode worker."""

    port: int
    pid: int

    def cpu_s(self) -> float:
        """CPU time so far, of all its processes."""
        return family_cpu_s(self.pid)

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
    router = HttpRouter(port, process.pid)
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
