"""What every decode stage must do, relay and main alike, seen from the streams that a router and a prefill open."""

from collections.abc import AsyncIterator

import pytest

from kvrelay.stage.app import StageApp
from kvrelay.types import Role
from tests.pipeline.stages import KvSource, kv_source, leg, prompt, reference, sampling, stage


@pytest.fixture(params=[Role.RELAY, Role.MAIN])
async def app(request: pytest.FixtureRequest) -> AsyncIterator[StageApp]:
    async with stage(request.param) as running:
        yield running


@pytest.fixture
async def source() -> AsyncIterator[KvSource]:
    async with kv_source() as running:
        yield running


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 45])
async def test_a_leg_that_is_fed_and_resumed_says_the_reference(app: StageApp, source: KvSource, length: int) -> None:
    ids, how = prompt(length), sampling()
    want = reference(ids, how)
    async with leg(app, ids, how) as (call, transfer_id):
        assert (await call.expect("opened")).cached_tokens == 0
        push = source.feed(app, transfer_id, ids)
        assert (await call.expect("ready")).blocks_received == length // 16
        await call.resume(want[:1])
        finished = await call.until("finished")
        await call.ended()
        assert want[:1] + call.ids == want
        assert finished.completion_tokens == len(want)
        assert (await push.done()).outcome == "committed"
