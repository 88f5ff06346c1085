"""Two datacenters on one host, as processes. Knows how to start, watch, kill and stop them; knows no request.

`async with cluster(spec) as running:` yields when every process is ready and the router can use every stage; on exit,
however it comes, all processes are gone.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any

from kvrelay.cli import ready
from kvrelay.cli.ports import bindable, free_ports
from kvrelay.cli.process import Process, State
from kvrelay.cli.spec import LOOPBACK, Addresses, ClusterSpec, redis_argv, router_argv, stage_argv, wan_argv
from kvrelay.index.server import find_redis
from kvrelay.rpc.health import LIVE

Observer = Callable[[Process], None]


class ClusterError(Exception):
    """A process did not start, or ended by itself. `tail`: the last lines of its log."""

    def __init__(self, message: str, tail: list[str] | None = None) -> None:
        super().__init__(message)
        self.tail = tail or []


class Cluster:
    """The running processes, by name: redis, wan, prefill-1, relay-1, main-1, router, ..."""

    def __init__(self, spec: ClusterSpec, at: Addresses, observe: Observer) -> None:
        self.spec = spec
        self.at = at
        self.processes: dict[str, Process] = {}
        self._observe = observe
        self._watchers: set[asyncio.Task[None]] = set()
        self._died: asyncio.Queue[Process] = asyncio.Queue()
        self._expected: set[str] = set()
        """Names of processes whose end was asked for."""

    @property
    def router_address(self) -> str:
        """host:port that clients dial."""
        return self.at.router

    @property
    def wan_address(self) -> str:
        """host:port of the WAN emulator's admin service."""
        return self.at.wan

    async def start(self) -> None:
        """Starts everything; returns when all is ready. ClusterError names what failed."""
        try:
            async with asyncio.timeout(self.spec.ready_s):
                await self._unless_one_dies(self._start())
        except TimeoutError:
            late = [p.name for p in self.processes.values() if p.state is not State.READY] or ["the router's fleet"]
            raise ClusterError(f"not ready after {self.spec.ready_s:g} s: {', '.join(late)}") from None

    async def failed(self) -> Process:
        """Returns the next process that ends without having been asked to."""
        return await self._died.get()

    async def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal that ends the process, and waits until it has ended."""
        self._expected.add(name)
        self.processes[name].send(number)
        await self.processes[name].ended()

    async def restart(self, name: str) -> None:
        """Starts an ended process again on its address; returns when it, and what the router knows of it, is ready."""
        await self._spawn(self.processes[name])
        await self._until_ready(name)
        if name in self.at.stages:
            await self._until_usable([name])
        elif name == "router":
            await self._until_usable(list(self.at.stages))

    async def stop(self) -> list[str]:
        """Ends everything, clients before servers. Names of those that had to be killed."""
        killed = []
        for names in (["router"], list(self.at.stages), ["wan", "redis"]):
            group = [self.processes[name] for name in names if name in self.processes]
            self._expected.update(process.name for process in group)
            ended = await asyncio.gather(*(process.stop(self.spec.grace_s) for process in group))
            killed += [process.name for process, clean in zip(group, ended, strict=True) if not clean]
        await asyncio.gather(*self._watchers)
        return killed

    async def _start(self) -> None:
        """All at once: programs load for seconds, and wait for one another while they run. Only what is behind the WAN
        must know its ports there first.
        """
        near, far = self._split()
        async with asyncio.TaskGroup() as starting:
            for name in ("redis", *near):
                starting.create_task(self._launch(name))
            await self._launch("wan")
            reach = await self._reach(far)
            for name in (*far, "router"):
                starting.create_task(self._launch(name, reach))
        await self._until_usable(list(self.at.stages))

    async def _until_usable(self, names: list[str]) -> None:
        epochs = await asyncio.gather(*(ready.epoch_of(self.at.stages[name]) for name in names))
        await ready.usable(self.router_address, dict(zip(names, epochs, strict=True)))

    def _split(self) -> tuple[list[str], list[str]]:
        """Names of the stages at site A, and of those behind the WAN."""
        stages = self.spec.stages()
        return [s.name for s in stages if s.site == "a"], [s.name for s in stages if s.site == "b"]

    async def _reach(self, far: list[str]) -> dict[str, str]:
        """Where each stage, and "redis" for those behind the WAN, is dialled: by mapped ports across the WAN."""
        reach = {name: address for name, address in self.at.stages.items() if name not in far}
        for name in far:
            reach[name] = await ready.mapped(self.wan_address, self.at.stages[name], "b")
        return reach | {"redis": await ready.mapped(self.wan_address, self.at.redis, "a")}

    async def _launch(self, name: str, reach: Mapping[str, str] | None = None) -> None:
        argv = await asyncio.to_thread(self._argv, name, dict(reach or {}))
        address = {"router": self.at.router, "redis": self.at.redis, "wan": self.at.wan, **self.at.stages}[name]
        log = self.spec.log_dir / f"{name}.log"
        self.processes[name] = Process(name, argv, log, address, self._changed)
        await self._spawn(self.processes[name])
        await self._until_ready(name)

    def _argv(self, name: str, reach: dict[str, str]) -> list[str]:
        far_redis = reach.pop("redis", "")
        if name == "redis":
            host, port = self.at.redis.rsplit(":", 1)
            return redis_argv(find_redis(), host, int(port))
        if name == "wan":
            return wan_argv(self.spec, self.at)
        if name == "router":
            return router_argv(self.spec, self.at, reach)
        stage = next(stage for stage in self.spec.stages() if stage.name == name)
        redis = self.at.redis if stage.site == "a" else far_redis
        return stage_argv(self.spec, stage, self.at, f"redis://{redis}/0")

    async def _spawn(self, process: Process) -> None:
        self._expected.discard(process.name)
        await process.start()
        watcher = asyncio.create_task(process.watch(), name=f"watch {process.name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _until_ready(self, name: str) -> None:
        process = self.processes[name]
        if name == "redis":
            await ready.redis_answers(process.address)
        elif name == "router" and not self.spec.complete:
            await ready.serving(process.address, LIVE)
        else:
            await ready.serving(process.address)
        if process.state is State.STARTING:
            process.become(State.READY)

    def _changed(self, process: Process) -> None:
        if process.state is State.DIED and process.name not in self._expected:
            self._died.put_nowait(process)
        self._observe(process)

    async def _unless_one_dies(self, work: Coroutine[Any, Any, None]) -> None:
        """Awaits `work`; ClusterError as soon as a process ends by itself."""
        task, death = asyncio.ensure_future(work), asyncio.ensure_future(self.failed())
        try:
            await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise await obituary(death.result())
            await task
        finally:
            for waiting in (task, death):
                waiting.cancel()
            await asyncio.gather(task, death, return_exceptions=True)


async def obituary(process: Process) -> ClusterError:
    """What to say of a process that ended by itself."""
    tail = await process.tail()
    how = process.returncode or 0
    ended = f"was killed by {signal.Signals(-how).name}" if how < 0 else f"ended with exit code {how}"
    return ClusterError(f"{process.name} {ended} (log: {process.log_path})", tail)


def choose_addresses(spec: ClusterSpec) -> Addresses:
    """Ports for everything. ClusterError if the router's is in use."""
    if spec.router_port and not bindable(spec.host, spec.router_port):
        raise ClusterError(f"port {spec.router_port} on {spec.host} is in use; choose another with --router-port")
    names = [stage.name for stage in spec.stages()]
    router_port, *ports = free_ports(LOOPBACK, 3 + len(names))
    redis, wan, *stages = (f"{LOOPBACK}:{port}" for port in ports)
    router = f"{spec.host}:{spec.router_port or router_port}"
    return Addresses(router, redis, wan, dict(zip(names, stages, strict=True)))


@contextlib.asynccontextmanager
async def cluster(spec: ClusterSpec, observe: Observer = lambda process: None) -> AsyncIterator[Cluster]:
    """Runs a whole topology while the block runs. `observe` is called at each change of a process's state.

    Raises ClusterError when something does not start; then, too, nothing is left running.
    """
    running = Cluster(spec, choose_addresses(spec), observe)
    try:
        await running.start()
        yield running
    finally:
        await asyncio.shield(running.stop())
