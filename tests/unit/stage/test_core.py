"""What a stage has before it serves."""

from collections import Counter

import pytest
from prometheus_client import generate_latest

from kvrelay.model import fallbacks
from kvrelay.settings import StageSettings
from kvrelay.stage.core import stage_core
from kvrelay.types import Role


async def test_what_could_not_be_done_with_the_model_is_counted_as_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallbacks, "taken", Counter({"weights_not_stored": 2}))
    async with stage_core(StageSettings(model="tiny", threads=1, pool_tokens=1024), Role.MAIN) as core:
        told = generate_latest(core.metrics.registry).decode()
    assert 'kvrelay_fallbacks_total{reason="weights_not_stored"} 2.0' in told
