"""When a stage reports its load, and when it has nothing to say."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

from kvrelay.proto.v1 import stage_pb2
from kvrelay.stage import service
from kvrelay.stage.core import StageCore
from kvrelay.stage.intake import Intake
from kvrelay.stage.load import LoadMeter
from kvrelay.stage.service import StageService
from kvrelay.types import StageLoad

ASKED = stage_pb2.WatchLoadRequest()


def stage(loads: Iterator[StageLoad], interval_s: float = 0.001) -> StageService:
    """A stage whose load is the next one of these whenever it is looked at."""
    core = SimpleNamespace(intake=Intake("s"), settings=SimpleNamespace(report_interval_s=interval_s))
    return StageService(cast(StageCore, core), cast(LoadMeter, lambda: next(loads)))


async def reports(told: StageService, count: int) -> list[stage_pb2.LoadReport]:
    watch: Any = told.WatchLoad(ASKED, None)
    async with asyncio.timeout(10):
        found = [await anext(watch) for _ in range(count)]
    await watch.aclose()
    return found


async def test_an_idle_stage_does_not_repeat_itself(monkeypatch: Any) -> None:
    monkeypatch.setattr(service, "IDLE_GAP_S", 60.0)
    idle, changed = StageLoad(steps=1), StageLoad(steps=2)
    loads = iter([idle, idle, idle, idle, changed])
    assert [report.steps for report in await reports(stage(loads), 2)] == [1, 2]
    assert next(loads, None) is None


async def test_an_idle_stage_says_so_from_time_to_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(service, "IDLE_GAP_S", 0.0)
    loads = iter([StageLoad()] * 3)
    assert len(await reports(stage(loads), 3)) == 3


async def test_a_stage_at_work_reports_each_time(monkeypatch: Any) -> None:
    monkeypatch.setattr(service, "IDLE_GAP_S", 60.0)
    loads = iter([StageLoad(running=1, waiting=2)] * 3)
    assert [report.waiting for report in await reports(stage(loads), 3)] == [2, 2, 2]
