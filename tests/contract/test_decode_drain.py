"""Extend{final}: the answer is complete elsewhere, and main's cache must hold prompt and output all the same."""

from collections.abc import AsyncIterator

import pytest

from kvrelay.stage.app import StageApp
from kvrelay.types import Role
from tests.pipeline.stages import KvSource, LegCall, kv_source, leg, prompt, reference, sampling, stage

LENGTH, OUTPUT = 40, 24
CACHED = (LENGTH + OUTPUT - 1) // 16 * 16


@pytest.fixture(params=[Role.RELAY, Role.MAIN])
async def app(request: pytest.FixtureRequest) -> AsyncIterator[StageApp]:
    async with stage(request.param, max_running=1) as running:
        yield running


@pytest.fixture
async def source() -> AsyncIterator[KvSource]:
    async with kv_source() as running:
        yield running


IDS, HOW = prompt(LENGTH), sampling(OUTPUT)


async def drained(call: LegCall) -> None:
    assert (await call.until("drained")).cached_tokens == CACHED
    await call.ended()
    assert "tokens" not in call.events


async def holds_all(app: StageApp) -> None:
    """What follows prompt and output hits both."""
    more = IDS + reference(IDS, HOW) + [1, 2, 3]
    async with leg(app, more, HOW, local_prefill=True) as (call, _):
        assert (await call.expect("opened")).cached_tokens == CACHED


async def test_final_while_queued(app: StageApp, source: KvSource) -> None:
    async with leg(app, prompt(20, 1), HOW) as (first, _):
        await first.expect("opened")
        async with leg(app, IDS, HOW) as (call, transfer_id):
            await call.extend(reference(IDS, HOW), final=True)
            await call.in_state("DRAINING")
            source.feed(app, transfer_id, IDS)
            first.cancel()
            await drained(call)
    await holds_all(app)


async def test_final_while_loading(app: StageApp, source: KvSource) -> None:
    async with leg(app, IDS, HOW) as (call, transfer_id):
        await call.expect("opened")
        feed = source.compute(IDS)
        source.push(app, transfer_id, feed, 1)
        await call.extend(reference(IDS, HOW), final=True)
        await call.in_state("DRAINING")
        feed.publish(2)
        await drained(call)
    await holds_all(app)


async def test_final_while_the_rest_of_the_prompt_is_computed() -> None:
    async with stage(Role.MAIN, pace="fixed=60", token_budget=16) as app:
        async with leg(app, IDS, HOW, local_prefill=True) as (call, _):
            await call.expect("opened")
            await call.in_state("PREPARING")
            await call.extend(reference(IDS, HOW), final=True)
            await drained(call)
            assert call.events[0] == "opened" and "ready" not in call.events
        await holds_all(app)


async def test_final_when_ready(app: StageApp, source: KvSource) -> None:
    async with leg(app, IDS, HOW) as (call, transfer_id):
        source.feed(app, transfer_id, IDS)
        await call.until("ready")
        await call.extend(reference(IDS, HOW), final=True)
        await drained(call)
    await holds_all(app)


async def test_final_without_ids_when_all_have_been_extended(app: StageApp, source: KvSource) -> None:
    async with leg(app, IDS, HOW) as (call, transfer_id):
        source.feed(app, transfer_id, IDS)
        await call.until("ready")
        await call.extend(reference(IDS, HOW))
        await call.expect("extended")
        await call.extend([], final=True)
        await drained(call)
    await holds_all(app)


@pytest.mark.parametrize("rest", [0, 1, 9])
async def test_final_while_an_extend_is_in_flight(app: StageApp, source: KvSource, rest: int) -> None:
    want = reference(IDS, HOW)
    async with leg(app, IDS, HOW) as (call, transfer_id):
        source.feed(app, transfer_id, IDS)
        await call.until("ready")
        await call.extend(want[: OUTPUT - rest])
        await call.extend(want[OUTPUT - rest :], final=True)
        await drained(call)
    await holds_all(app)


async def test_final_with_an_answer_of_one_token(app: StageApp, source: KvSource) -> None:
    async with leg(app, IDS, sampling(1)) as (call, transfer_id):
        source.feed(app, transfer_id, IDS)
        await call.extend(reference(IDS, sampling(1)), final=True)
        assert (await call.until("drained")).cached_tokens == 32
        await call.ended()


async def test_stop_cuts_a_drain(app: StageApp) -> None:
    async with leg(app, IDS, HOW) as (call, _):
        await call.expect("opened")
        await call.extend(reference(IDS, HOW), final=True)
        await call.stop()
        assert (await call.expect("stopped")).next_index == OUTPUT
        await call.ended()


async def test_without_a_prefix_cache_a_drain_says_that_nothing_is_cached(source: KvSource) -> None:
    async with stage(Role.MAIN, prefix_cache=False) as app, leg(app, IDS, HOW) as (call, transfer_id):
        source.feed(app, transfer_id, IDS)
        await call.extend(reference(IDS, HOW), final=True)
        assert (await call.until("drained")).cached_tokens == 0
