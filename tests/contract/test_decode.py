"""What every decode stage must do, relay and main alike: the orders that messages, KV and tokens can take."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from kvrelay.stage.app import StageApp
from kvrelay.types import Role, Sampling
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


async def test_resume_before_the_kv_is_enough(app: StageApp, source: KvSource) -> None:
    ids, how = prompt(40), sampling()
    want = reference(ids, how)
    async with leg(app, ids, how) as (call, transfer_id):
        await call.expect("opened")
        await call.resume(want[:1])
        await call.in_state("ARMED")
        source.feed(app, transfer_id, ids)
        await call.expect("ready")
        await call.until("finished")
        assert want[:1] + call.ids == want


async def test_resume_before_admission_is_enough(source: KvSource) -> None:
    ids, how = prompt(40), sampling()
    want = reference(ids, how)
    async with stage(Role.MAIN, max_running=1) as app:
        async with leg(app, prompt(20, 1), how) as (first, _):
            await first.expect("opened")
            async with leg(app, ids, how) as (call, transfer_id):
                await call.resume(want[:1])
                await call.in_state("ARMED_QUEUED")
                source.feed(app, transfer_id, ids)
                first.cancel()
                await call.expect("opened")
                await call.expect("ready")
                await call.until("finished")
                assert want[:1] + call.ids == want


async def test_resume_without_new_ids_follows_an_extend(app: StageApp, source: KvSource) -> None:
    ids, how = prompt(31), sampling(20)
    want = reference(ids, how)
    async with leg(app, ids, how) as (call, transfer_id):
        source.feed(app, transfer_id, ids)
        await call.until("ready")
        await call.extend(want[:5])
        assert (await call.expect("extended")).next_index == 5
        await call.resume()
        await call.until("finished")
        assert want[:5] + call.ids == want


@pytest.mark.parametrize("rounds", [[1, 1, 1], [15, 1], [16], [17, 4, 9], [0, 3], [40]])
async def test_catch_up_in_any_rounds_goes_on_as_the_reference(
    app: StageApp, source: KvSource, rounds: list[int]
) -> None:
    ids, how = prompt(30), sampling(48)
    want = reference(ids, how)
    async with leg(app, ids, how) as (call, transfer_id):
        source.feed(app, transfer_id, ids)
        await call.until("ready")
        for count in rounds:
            await call.extend(want[call.next_index : call.next_index + count])
            assert (await call.expect("extended")).next_index == call.next_index
        handed = call.next_index
        await call.resume(want[handed : handed + 2])
        await call.until("finished")
        assert want[: handed + 2] + call.ids == want


async def test_resume_while_an_extend_is_in_flight_is_answered_by_tokens_only(app: StageApp, source: KvSource) -> None:
    ids, how = prompt(30), sampling(40)
    want = reference(ids, how)
    async with leg(app, ids, how) as (call, transfer_id):
        source.feed(app, transfer_id, ids)
        await call.until("ready")
        await call.extend(want[:20])
        await call.resume(want[20:22])
        await call.until("finished")
        assert want[:22] + call.ids == want
        assert call.events.count("extended") <= 1


async def test_local_prefill_samples_index_0_by_itself(app: StageApp) -> None:
    ids, how = prompt(40), sampling()
    async with leg(app, ids, how, local_prefill=True) as (call, _):
        await call.resume()
        await call.expect("opened")
        assert (await call.expect("ready")).blocks_received == 0
        await call.until("finished")
        assert call.ids == reference(ids, how)


async def test_local_prefill_is_ready_before_its_resume(app: StageApp) -> None:
    ids, how = prompt(40), sampling()
    want = reference(ids, how)
    async with leg(app, ids, how, local_prefill=True) as (call, _):
        await call.expect("opened")
        await call.expect("ready")
        await call.extend(want[:3])
        await call.expect("extended")
        await call.resume(want[3:4])
        await call.until("finished")
        assert want[:4] + call.ids == want


@pytest.mark.parametrize("length", [32, 40])
async def test_a_full_hit_needs_no_transfer_and_still_commits_it(app: StageApp, source: KvSource, length: int) -> None:
    ids, how = prompt(length), sampling()
    want = reference(ids, how)
    async with leg(app, ids, how, local_prefill=True) as (call, _):
        await call.resume()
        await call.until("finished")
        await call.ended()
    async with leg(app, ids, how) as (call, transfer_id):
        assert (await call.expect("opened")).cached_tokens == 32
        assert (await call.expect("ready")).blocks_received == 0
        push = source.feed(app, transfer_id, ids)
        result = await push.done()
        assert (result.outcome, result.blocks_sent, result.blocks_cached) == ("committed", 0, 2)
        await call.resume(want[:1])
        await call.until("finished")
        assert want[:1] + call.ids == want


async def test_a_partial_hit_takes_only_what_is_missing(app: StageApp, source: KvSource) -> None:
    ids, how = prompt(70), sampling()
    async with leg(app, ids[:40], how, local_prefill=True) as (call, _):
        await call.until("ready")
    async with leg(app, ids, how) as (call, transfer_id):
        assert (await call.expect("opened")).cached_tokens == 32
        source.feed(app, transfer_id, ids)
        assert (await call.expect("ready")).blocks_received == 2
        await call.resume(reference(ids, how)[:1])
        await call.until("finished")
        assert reference(ids, how)[:1] + call.ids == reference(ids, how)


async def test_an_offer_before_the_leg_is_parked(app: StageApp, source: KvSource) -> None:
    ids, how = prompt(40), sampling()
    push = source.feed(app, "early", ids)
    while not app.leftovers().get("parked_offers"):  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    async with leg(app, ids, how, transfer_id="early") as (call, _):
        await call.until("ready")
        assert (await push.done()).outcome == "committed"


async def test_two_legs_that_take_the_same_prefix_at_once_both_say_the_reference(
    app: StageApp, source: KvSource
) -> None:
    ids, other, how = prompt(64) + [1, 2, 3], prompt(64) + [9, 8], sampling(30)
    async with leg(app, ids, how) as (one, first), leg(app, other, how) as (two, second):
        await one.expect("opened")
        await two.expect("opened")
        feeds = source.compute(ids), source.compute(other)
        source.push(app, first, feeds[0], 2)
        source.push(app, second, feeds[1])
        await two.expect("ready")
        feeds[0].publish(4)
        await one.expect("ready")
        await one.resume(reference(ids, how)[:1])
        await two.resume(reference(other, how)[:1])
        await one.until("finished")
        await two.until("finished")
        assert reference(ids, how)[:1] + one.ids == reference(ids, how)
        assert reference(other, how)[:1] + two.ids == reference(other, how)


async def test_stop_before_decoding_is_answered_at_once_with_the_next_index(app: StageApp, source: KvSource) -> None:
    ids, how = prompt(40), sampling()
    async with leg(app, ids, how) as (call, _):
        await call.expect("opened")
        await call.stop()
        assert (await call.expect("stopped")).next_index == 0
        await call.ended()
    async with leg(app, ids, how) as (call, transfer_id):
        source.feed(app, transfer_id, ids)
        await call.until("ready")
        await call.extend(reference(ids, how)[:4])
        await call.expect("extended")
        await call.stop()
        assert (await call.expect("stopped")).next_index == 4
        await call.ended()


async def test_stop_while_decoding_ends_with_the_index_behind_the_last_token(app: StageApp) -> None:
    ids, how = prompt(20), sampling(1500)
    async with leg(app, ids, how, local_prefill=True) as (call, _):
        await call.resume()
        await call.until("tokens")
        await call.stop()
        stopped = await call.until("stopped")
        await call.ended()
        assert stopped.next_index == call.next_index < 1500
        assert call.ids == reference(ids, sampling(call.next_index))


async def test_messages_after_the_end_are_ignored_and_the_end_is_clean(app: StageApp) -> None:
    ids, how = prompt(20), sampling(4)
    async with leg(app, ids, how, local_prefill=True) as (call, _):
        await call.resume()
        await call.until("finished")
        await app.settle()
        await call.stop()
        await call.stop()
        await call.ended()
        assert call.events.count("finished") == 1


async def test_a_router_that_says_no_more_does_not_hold_an_ended_leg_open(app: StageApp) -> None:
    async with leg(app, prompt(20), sampling(4), local_prefill=True) as (call, _):
        await call.resume()
        await call.until("finished")
        assert await call.next() is None
        assert await call.call.code() is grpc.StatusCode.OK


@pytest.mark.parametrize("how", [sampling(1), sampling(2), sampling(200, ignore_eos=False, seed=3, temperature=1.5)])
async def test_the_end_comes_where_the_reference_ends(app: StageApp, how: Sampling) -> None:
    ids = prompt(20)
    async with leg(app, ids, how, local_prefill=True) as (call, _):
        await call.resume()
        finished = await call.until("finished")
        assert call.ids == reference(ids, how)
        assert finished.completion_tokens == len(call.ids)


async def test_a_budget_pauses_the_leg_there(app: StageApp) -> None:
    ids, how = prompt(20), sampling(40)
    async with leg(app, ids, how, local_prefill=True, output_budget=6) as (call, _):
        await call.resume()
        assert (await call.until("paused")).next_index == 6
        assert call.ids == reference(ids, how)[:6]
        await call.stop()
        assert (await call.expect("stopped")).next_index == 6
        await call.ended()


async def test_a_budget_used_up_by_given_ids_pauses_at_once(app: StageApp, source: KvSource) -> None:
    ids, how = prompt(20), sampling(40)
    async with leg(app, ids, how, output_budget=2) as (call, transfer_id):
        source.feed(app, transfer_id, ids)
        await call.resume(reference(ids, how)[:2])
        await call.expect("opened")
        await call.expect("ready")
        assert (await call.expect("paused")).next_index == 2


async def test_the_leg_goes_on_after_the_router_has_half_closed(app: StageApp) -> None:
    ids, how = prompt(20), sampling(30)
    async with leg(app, ids, how, local_prefill=True) as (call, _):
        await call.resume()
        await call.call.done_writing()
        await call.until("finished")
        await call.ended()
        assert call.ids == reference(ids, how)


async def test_logprobs_come_one_per_id(app: StageApp) -> None:
    async with leg(app, prompt(20), sampling(5, logprobs=2), local_prefill=True) as (call, _):
        await call.resume()
        tokens = await call.until("tokens")
        assert len(tokens.logprobs) == len(tokens.ids)
        assert all(len(item.top) == 2 for item in tokens.logprobs)


async def test_a_preempted_leg_goes_on_as_if_nothing_had_been(source: KvSource) -> None:
    how = sampling(150)
    prompts = [prompt(40, seed) for seed in (1, 2)]
    wanted = [reference(ids, how) for ids in prompts]
    async with stage(Role.MAIN, pool_tokens=320, pace="fixed=3") as app:
        async with leg(app, prompts[0], how) as (one, first), leg(app, prompts[1], how) as (two, second):
            for call, transfer_id, ids in ((one, first, prompts[0]), (two, second, prompts[1])):
                source.feed(app, transfer_id, ids)
                await call.until("ready")
            await one.resume(wanted[0][:1])
            await two.resume(wanted[1][:1])
            async with asyncio.TaskGroup() as group:
                group.create_task(one.until("finished"))
                group.create_task(two.until("finished"))
        assert app.core.driver.load().preemptions > 0
    assert [want[:1] + call.ids for want, call in zip(wanted, (one, two), strict=True)] == wanted
