"""What a stage has before it serves."""

import logging
from collections import Counter
from typing import Any

import pytest
from prometheus_client import generate_latest

from kvrelay.fallbacks import fall_back
from kvrelay.settings import StageSettings
from kvrelay.stage import core
from kvrelay.types import Role


async def test_what_could_not_be_done_while_loading_is_counted_as_a_fallback(
    fallbacks_taken: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = core.load_model

    def load_with_trouble(*args: Any, **more: Any) -> Any:
        fall_back(logging.getLogger(), "weights_not_stored", "no room")
        return load(*args, **more)

    monkeypatch.setattr(core, "load_model", load_with_trouble)
    async with core.stage_core(StageSettings(model="tiny", threads=1, pool_tokens=1024), Role.MAIN) as stage:
        told = generate_latest(stage.metrics.registry).decode()
    assert fallbacks_taken["weights_not_stored"] == 1
    assert 'kvrelay_fallbacks_total{reason="weights_not_stored"} 1.0' in told
