"""Real processes for end-to-end tests: one small two-datacenter cluster for all of them, idle again after each."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvrelay.cli.cluster import Cluster, cluster
from kvrelay.cli.spec import ClusterSpec
from kvrelay.proto.v1 import router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel

IDLE_S = 25.0
"""A dead peer's streams end by keep-alive after 10 s, and a sweep frees the rest 10 s later."""


def small(log_dir: Path, **changes: Any) -> ClusterSpec:
    """The tiny model, paced so that requests live long enough to be disturbed, behind a WAN of 1 MB/s."""
    settings: dict[str, Any] = {
        "model": "tiny",
        "router_port": 0,
        "wan_rate": "8mbit",
        "wan_delay_ms": 5.0,
        "pool_tokens": 8192,
        "pace": "fixed=8",
        "log_dir": log_dir,
    }
    return ClusterSpec(**(settings | changes))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def town(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """1 prefill, 1 relay decode, 1 main decode."""
    async with cluster(small(tmp_path_factory.mktemp("logs"))) as running:
        yield running


@dataclass(frozen=True, slots=True)
class Router:
    """The town's router, as a client and as a watcher see it."""

    stub: "router_pb2_grpc.RouterServiceAsyncStub"
    address: str

    async def fleet(self) -> router_pb2.Fleet:
        """What the router says of its stages now."""
        return await self.stub.GetFleet(router_pb2.GetFleetRequest(), timeout=5.0)

    async def until_idle(self) -> None:
        """Returns once no request and no block is held anywhere; fails after IDLE_S with what is held."""
        async with asyncio.timeout(IDLE_S + 5):
            began = asyncio.get_running_loop().time()
            while busy := held(await self.fleet()):
                assert asyncio.get_running_loop().time() - began < IDLE_S, busy
                await asyncio.sleep(0.1)


def held(fleet: router_pb2.Fleet) -> dict[str, str]:
    """By stage: what keeps it from being idle. Stages that are gone hold nothing."""
    busy = {"router": f"{fleet.in_flight} in flight"} if fleet.in_flight else {}
    for stage in fleet.stages:
        load = stage.load
        whole = load.blocks_free + load.blocks_cached == load.blocks_total
        if stage.usable and (load.running or load.waiting or not whole):
            busy[stage.info.instance_id] = str(load).replace("\n", ", ")
    return busy


@pytest_asyncio.fixture(loop_scope="session")
async def router(town: Cluster) -> AsyncIterator[Router]:
    """A client's channel to the router; after the test everything must be idle."""
    async with open_channel(town.router_address, Purpose.TOKENS) as channel:
        client = Router(router_pb2_grpc.RouterServiceStub(channel), town.router_address)
        yield client
        await client.until_idle()


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    def documents(self) -> list[dict[str, Any]]:
        """The JSON documents that it printed one after the other."""
        decoder, text, found = json.JSONDecoder(), self.out.strip(), []
        while text:
            document, end = decoder.raw_decode(text)
            found.append(document)
            text = text[end:].strip()
        return found


async def program(name: str, *arguments: str, limit_s: float = 40.0) -> Ran:
    """Runs a console script of this environment to its end."""
    path = Path(sys.executable).with_name(name)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(str(path), *arguments, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(limit_s):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.communicate()
        raise
    return Ran(process.returncode or 0, out.decode(), err.decode())


async def grpcurl(address: str, *arguments: str, data: object = None, flags: tuple[str, ...] = ()) -> Ran:
    """Runs the real grpcurl, which knows nothing but what the server's reflection says."""
    body = () if data is None else ("-d", json.dumps(data))
    return await program("grpcurl", "-plaintext", *flags, *body, address, *arguments)
