"""One stage's load: engine, links, door and index in one report. Knows no protobuf."""

from collections.abc import Callable, Sequence

from kvrelay.engine.driver import EngineDriver
from kvrelay.stage.intake import Intake
from kvrelay.types import LinkLoad, StageLoad


class LoadMeter:
    """`meter()` is the load now."""

    def __init__(self, driver: EngineDriver, intake: Intake, links: Callable[[], Sequence[LinkLoad]]) -> None:
        self._driver = driver
        self._intake = intake
        self._links = links
        self.index_connected: Callable[[], bool] = lambda: False

    def __call__(self) -> StageLoad:
        engine = self._driver.load()
        return StageLoad(
            running=engine.running,
            waiting=engine.waiting,
            max_running=engine.max_running,
            blocks_total=engine.blocks_total,
            blocks_free=engine.blocks_free,
            blocks_cached=engine.blocks_cached,
            queued_tokens=engine.queued_tokens,
            prefill_tokens_per_s=engine.prefill_tokens_per_s,
            prefill_step_ms=engine.prefill_step_ms,
            step_ms=engine.step_ms,
            draining=self._intake.draining,
            links=tuple(self._links()),
            index_connected=self.index_connected(),
            steps=engine.steps,
            steps_overrun=engine.steps_overrun,
        )
