"""A whole topology of real services in this process, on free ports, with the tiny model; checks the five invariants."""

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import uvloop

from kvrelay.index.server import redis_server
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import open_channel
from kvrelay.settings import StageSettings
from kvrelay.stage.app import StageApp
from kvrelay.wan.app import wan_emulator
from kvrelay.wan.emulator import WanEmulator
from kvrelay.wan.settings import WanSettings
from services.main_decode.app import main_decode_app
from services.prefill.app import prefill_app
from services.prefill.config import PrefillSettings
from services.relay_decode.app import relay_decode_app
from services.router.app import RouterApp, router_app
from services.router.config import RouterSettings

T = TypeVar("T")

SETTLE_S = 2.0
START_S = 20.0


@dataclass
class Got:
    """One answer, as the client saw it; checked while it was read."""

    started: router_pb2.Started
    outputs: list[router_pb2.Output]
    completed: router_pb2.Completed

    @property
    def ids(self) -> list[int]:
        """All output ids, by index."""
        return [token for output in self.outputs for token in output.tokens.ids]

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(output.text for output in self.outputs) + self.completed.text

    @property
    def report(self) -> router_pb2.RequestReport:
        """What happened."""
        return self.completed.report


@dataclass
class Topology:
    """What runs. Tests may stop parts of it through `stack`s of their own (see `stop`)."""

    router: RouterApp
    stub: "router_pb2_grpc.RouterServiceAsyncStub"
    prefill: list[StageApp]
    relay: list[StageApp]
    main: list[StageApp]
    wan: WanEmulator | None
    redis_url: str
    _own: dict[str, AsyncExitStack] = field(default_factory=dict)

    @property
    def stages(self) -> list[StageApp]:
        """All that still run."""
        return [*self.prefill, *self.relay, *self.main]

    async def generate(self, request: router_pb2.GenerateRequest, timeout: float = 30.0) -> Got:
        """Runs one request to its end and checks invariants 3 to 5."""
        return await collect(self.stub.Generate(request, timeout=timeout))

    async def flush(self, *stages: StageApp) -> None:
        """Empties the caches of these stages (all, if none is named), and the router's memory, once all is idle."""
        await self.settled()
        for stage in stages or self.stages:
            await stage.core.driver.flush_cache()
            self.router.rooms.prefixes.forget(stage.description.instance_id)

    async def stop(self, stage: StageApp) -> None:
        """Takes one stage down; its open streams break."""
        for stages in (self.prefill, self.relay, self.main):
            if stage in stages:
                stages.remove(stage)
        await self._own.pop(stage.description.instance_id).aclose()

    async def settled(self) -> None:
        """Invariants 1 and 2: every app lets go of everything within SETTLE_S, and every pool is whole."""
        try:
            async with asyncio.timeout(SETTLE_S):
                while any(app.leftovers() for app in (self.router, *self.stages)):  # noqa: ASYNC110  # no one event says so
                    await asyncio.sleep(0.005)
        except TimeoutError:
            held = {stage.description.instance_id: stage.leftovers() for stage in self.stages if stage.leftovers()}
            raise AssertionError(f"still held: router {self.router.leftovers()}, {held}") from None
        for stage in self.stages:
            await stage.settle(SETTLE_S)


async def collect(replies: Any) -> Got:
    """Reads a Generate stream to its end: Started, contiguous outputs, exactly one Completed, usage that adds up."""
    started: router_pb2.Started | None = None
    completed: router_pb2.Completed | None = None
    outputs: list[router_pb2.Output] = []
    count = 0
    async for reply in replies:
        assert completed is None, "a message after Completed"
        kind = reply.WhichOneof("reply")
        if kind == "started":
            assert started is None and not outputs, "Started must come once, first"
            started = reply.started
        elif kind == "output":
            assert started is not None
            assert reply.output.tokens.first_index == count, f"gap or repeat at {count}: {reply.output}"
            assert reply.output.tokens.source != common_pb2.SOURCE_UNSPECIFIED
            assert len(reply.output.tokens.logprobs) in (0, len(reply.output.tokens.ids))
            count += len(reply.output.tokens.ids)
            outputs.append(reply.output)
        else:
            completed = reply.completed
    assert started is not None and completed is not None, "a cut stream is not success"
    usage = completed.usage
    assert usage.completion_tokens == count
    assert usage.prefill_tokens + usage.relay_tokens + usage.main_tokens == count
    for source, tokens in (
        (common_pb2.SOURCE_PREFILL, usage.prefill_tokens),
        (common_pb2.SOURCE_RELAY, usage.relay_tokens),
        (common_pb2.SOURCE_MAIN, usage.main_tokens),
    ):
        assert tokens == sum(len(o.tokens.ids) for o in outputs if o.tokens.source == source)
    for cached in (usage.cached_prefill_tokens, usage.cached_relay_tokens, usage.cached_main_tokens):
        assert cached <= usage.prompt_tokens
    return Got(started, outputs, completed)


def ask(
    prompt: str | Sequence[int],
    *,
    max_tokens: int = 16,
    pipeline: router_pb2.Pipeline = router_pb2.PIPELINE_UNSPECIFIED,
    mode: router_pb2.HandoffMode = router_pb2.HANDOFF_MODE_UNSPECIFIED,
    stop: Sequence[str] = (),
    **sampling: Any,
) -> router_pb2.GenerateRequest:
    """A request; greedy with seed 1 unless told otherwise."""
    sampling.setdefault("temperature", 0.0)
    sampling.setdefault("seed", 1)
    request = router_pb2.GenerateRequest(
        sampling=common_pb2.Sampling(max_tokens=max_tokens, **sampling),
        stop=stop,
        pipeline=pipeline,
        handoff_mode=mode,
    )
    if isinstance(prompt, str):
        request.prompt = prompt
    else:
        request.token_ids.ids.extend(prompt)
    return request


@asynccontextmanager
async def topology(
    *,
    prefill: int = 1,
    relay: int = 1,
    main: int = 1,
    redis: bool | str = False,
    main_site: str = "b",
    wan: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
    stage: dict[str, Any] | None = None,
    per_role: dict[str, dict[str, Any]] | None = None,
) -> AsyncIterator[Topology]:
    """Stages named p0, r0, m0, ...; `wan` (WanSettings) puts the emulator between the sites; `redis` may be a URL.

    On the way out the five invariants are checked, unless the body has failed already.
    """
    common = {"model": "tiny", "threads": 1, "pool_tokens": 4096, "shutdown_grace_s": 0.2, "bulk_listen": "127.0.0.1:0"}
    common |= stage or {}
    per_role = per_role or {}
    async with AsyncExitStack() as stack:
        redis_url = redis if isinstance(redis, str) else ""
        if redis is True:
            redis_url = await stack.enter_async_context(redis_server())
        emulator = None
        if wan is not None:
            emulator = await stack.enter_async_context(wan_emulator(WanSettings(**{"listen": "127.0.0.1:0", **wan})))
        own: dict[str, AsyncExitStack] = {}

        async def start(kind: str, app: Any, settings: type[StageSettings], count: int, site: str) -> list[StageApp]:
            started = []
            for index in range(count):
                name = f"{kind}{index}"
                via = emulator.admin_address if emulator is not None and site == "b" else ""
                wanted = {"advertise_via": via, **common, **per_role.get(kind, {})}
                own[name] = await stack.enter_async_context(AsyncExitStack())
                started.append(
                    await own[name].enter_async_context(
                        app(settings(instance_id=name, site=site, redis_url=redis_url, **wanted))
                    )
                )
            return started

        mains = await start("m", main_decode_app, StageSettings, main, main_site)
        relays = await start("r", relay_decode_app, StageSettings, relay, "a")
        prefills = await start("p", prefill_app, PrefillSettings, prefill, "a")
        addresses = [app.description.address for app in (*prefills, *relays, *mains)]
        settings = {"model": "tiny", "stages": addresses, "redis_url": redis_url, "redial_min_s": 0.05}
        running = await stack.enter_async_context(
            router_app(RouterSettings(listen="127.0.0.1:0", shutdown_grace_s=0.2, **{**settings, **(router or {})}))
        )
        channel = await stack.enter_async_context(open_channel(running.address))
        stub = router_pb2_grpc.RouterServiceStub(channel)
        found = Topology(running, stub, prefills, relays, mains, emulator, redis_url, own)
        await joined(running, len(addresses))
        yield found
        await found.settled()


class InThread:
    """A topology on a loop of its own thread, for tests whose examples are many and not coroutines."""

    def __init__(self, **wanted: Any) -> None:
        self._wanted = wanted
        self._started: concurrent.futures.Future[Topology] = concurrent.futures.Future()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._main()), name="topology")

    def __enter__(self) -> "InThread":
        self._thread.start()
        self.topology = self._started.result(START_S)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on that loop and waits for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        try:
            async with topology(**self._wanted) as running:
                self._started.set_result(running)
                await self._stop.wait()
        except BaseException as error:
            if self._started.done():
                raise
            self._started.set_exception(error)


async def joined(router: RouterApp, stages: int) -> None:
    """Returns once so many stages are usable."""
    async with asyncio.timeout(START_S):
        while sum(not view.why_not and view.load is not None for view in router.fleet.views()) < stages:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def status_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """("UNAVAILABLE", details)."""
    return error.code().name, error.details() or ""
