"""What surrounds a run: the fleet before and after it, and the WAN while it lasts. Reads; changes nothing."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from kvrelay.load.summary import Surroundings
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc, wan_pb2, wan_pb2_grpc
from kvrelay.rpc.channels import open_channel

ROLES = {common_pb2.ROLE_PREFILL: "prefill", common_pb2.ROLE_RELAY: "relay", common_pb2.ROLE_MAIN: "main"}
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 4}
PERIOD_S = 0.25


@dataclass(frozen=True, slots=True)
class LinkSample:
    """The WAN at one moment; bytes since its emulator began."""

    at_s: float
    """On time.perf_counter's clock."""
    out_bytes: int
    """From A to B."""
    back_bytes: int
    backlog_bytes: int
    """From A to B, waiting."""


class Watch:
    """What was seen so far."""

    def __init__(self) -> None:
        self.samples: list[LinkSample] = []
        self.before = router_pb2.Fleet()
        self.after = router_pb2.Fleet()
        self.rate_bytes_per_s = 0.0

    def around(self, cpu_share: float = 0.0) -> Surroundings:
        """As the summary wants it."""
        steps, overrun = (self._more(name) for name in ("steps", "steps_overrun"))
        return Surroundings(
            stages=dict(Counter(ROLES.get(stage.info.role, "") for stage in self.before.stages)),
            kv_bytes_per_token=kv_bytes_per_token(self.before),
            link_bytes_per_s=self.rate_bytes_per_s,
            link_bytes=self.samples[-1].out_bytes - self.samples[0].out_bytes if self.samples else 0,
            cut_transfers=self.after.fallbacks["singular_cut"] - self.before.fallbacks["singular_cut"],
            cpu_share=cpu_share,
            pace=next((stage.info.pace for stage in self.before.stages if stage.info.pace), ""),
            steps_overrun=overrun,
            steps=steps,
        )

    def _more(self, name: str) -> int:
        """How much a counter of the stages has grown; of those that are the same process as before."""
        before = {(s.info.instance_id, s.info.epoch): getattr(s.load, name) for s in self.before.stages}
        after = {(s.info.instance_id, s.info.epoch): getattr(s.load, name) for s in self.after.stages}
        return sum(int(after[key] - count) for key, count in before.items() if key in after)


def kv_bytes_per_token(fleet: router_pb2.Fleet) -> float:
    """Of the fleet's layout; 0 if it has no stage."""
    layout = next((stage.info.layout for stage in fleet.stages), None)
    if layout is None:
        return 0.0
    return float(layout.layers * 2 * layout.kv_heads * layout.head_dim * ITEM_BYTES.get(layout.dtype, 0))


@asynccontextmanager
async def watch(router: str | None, wan: str | None) -> AsyncIterator[Watch]:
    """Sees a run from its begin to its end; `after` is there after the block.

    router, wan: host:port of the router and of the WAN emulator's admin service, or None. AioRpcError if the router
    does not answer at first, or the emulator at any time.
    """
    seen = Watch()
    if router is not None:
        seen.before = await _fleet(router)
        seen.after.CopyFrom(seen.before)
    if wan is None:
        yield seen
    else:
        async with _sampled(wan, seen):
            yield seen
    if router is not None:
        try:
            seen.after = await _fleet(router)
        except grpc.aio.AioRpcError:  # the run's failures say so already
            return


async def _fleet(router: str) -> router_pb2.Fleet:
    async with open_channel(router) as channel:
        stub = router_pb2_grpc.RouterServiceStub(channel)
        return await stub.GetFleet(router_pb2.GetFleetRequest(), timeout=10.0)


@asynccontextmanager
async def _sampled(wan: str, seen: Watch) -> AsyncIterator[None]:
    async with open_channel(wan) as channel:
        stub = wan_pb2_grpc.WanServiceStub(channel)

        async def sample() -> None:
            link = await stub.GetLink(wan_pb2.GetLinkRequest(), timeout=10.0)
            seen.rate_bytes_per_s = link.a_to_b.rate_bytes_per_s
            out, back = link.a_to_b_stats, link.b_to_a_stats
            seen.samples.append(LinkSample(time.perf_counter(), out.bytes, back.bytes, out.backlog_bytes))

        async def sampling() -> None:
            while True:
                await asyncio.sleep(PERIOD_S)
                await sample()

        await sample()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(sampling())
            try:
                yield
            finally:
                task.cancel()
        await sample()
