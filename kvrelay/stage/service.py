"""StageService: what a stage tells the router of itself. Knows no leg and no prompt."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from kvrelay.proto.v1 import stage_pb2, stage_pb2_grpc
from kvrelay.rpc import convert
from kvrelay.stage.core import StageCore
from kvrelay.stage.load import LoadMeter
from kvrelay.types import StageDescription, StageLoad

SERVICE = "kvrelay.proto.v1.StageService"

LEAST_GAP_S = 0.01
"""Between two load reports, however often the load changes."""
IDLE_GAP_S = 1.0
"""Between the reports of a stage with nothing to do and nothing new to say."""


class StageService(stage_pb2_grpc.StageServiceServicer):
    """Served by every stage. Calls before `begin` wait for it; WatchLoad streams end with `end`."""

    def __init__(self, core: StageCore, meter: LoadMeter) -> None:
        self._core = core
        self._meter = meter
        self._description: asyncio.Future[StageDescription] = asyncio.get_running_loop().create_future()
        self._ended = False

    def begin(self, description: StageDescription) -> None:
        """The stage's address is known."""
        self._description.set_result(description)

    def end(self) -> None:
        """Ends every WatchLoad stream after a last report."""
        self._ended = True
        self._core.intake.changed()

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Any) -> stage_pb2.StageInfo:
        """Part of StageService."""
        return convert.description_to_proto(await asyncio.shield(self._description))

    async def WatchLoad(self, request: stage_pb2.WatchLoadRequest, context: Any) -> AsyncIterator[stage_pb2.LoadReport]:
        """Part of StageService. Holds nothing but its watcher, so a generator may do."""
        said: StageLoad | None = None
        said_at = 0.0
        with self._core.intake.watch() as changed:
            while True:
                changed.clear()
                load, now = self._meter(), time.monotonic()
                if load != said or load.running or now - said_at >= IDLE_GAP_S or self._ended:
                    said, said_at = load, now
                    yield convert.load_to_proto(load)
                if self._ended:
                    return
                await self._next_report(changed)

    async def FlushCache(self, request: stage_pb2.FlushCacheRequest, context: Any) -> stage_pb2.FlushCacheReply:
        """Part of StageService."""
        return stage_pb2.FlushCacheReply(blocks=await self._core.driver.flush_cache())

    async def Drain(self, request: stage_pb2.DrainRequest, context: Any) -> stage_pb2.DrainReply:
        """Part of StageService."""
        self._core.intake.shut()
        await self._core.intake.empty()
        return stage_pb2.DrainReply()

    async def _next_report(self, changed: asyncio.Event) -> None:
        interval = self._core.settings.report_interval_s
        gap = min(LEAST_GAP_S, interval)
        await asyncio.sleep(gap)
        try:
            async with asyncio.timeout(interval - gap):
                await changed.wait()
        except TimeoutError:
            pass
