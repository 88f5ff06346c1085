"""A stage that dies, is full, is late or lies, at each phase: who is asked instead, and with what ids."""

import asyncio

import grpc
import pytest

from kvrelay.errors import Overloaded, StageFailed
from kvrelay.proto.v1 import common_pb2
from kvrelay.types import Role
from tests.fakes_stages import WAIT_S
from tests.unit.router.rig import CATCH_UP, P_MD, Rig, legs_of, relaying, rig


async def test_a_relay_that_dies_hands_over_to_a_ready_main_in_mid_extend() -> None:
    async with rig(handoff_tokens=1) as running:
        asked = running.ask(max_tokens=5, mode=CATCH_UP)
        _, r, m = await relaying(running, asked)
        m.ready()
        await m.hears("extend")
        r.tokens(3, 13)
        await asked.until(4)
        r.fail(StageFailed("relay crashed"))
        resume = await m.hears("resume")
        assert (resume.first_index, list(resume.ids)) == (3, [13])
        m.tokens(4, 14)
        m.finished(5)
        completed = await asked.completed()
        assert asked.ids == [10, 11, 12, 13, 14]
        assert "relay_lost" in completed.report.fallbacks


async def test_a_relay_that_dies_without_a_replacement_leaves_main_armed() -> None:
    async with rig() as running:
        asked = running.ask(max_tokens=4)
        _, r, m = await relaying(running, asked)
        r.fail(StageFailed("relay crashed"))
        resume = await m.hears("resume")
        assert (resume.first_index, list(resume.ids)) == (0, [10, 11, 12])
        m.ready()
        m.tokens(3, 13)
        m.finished(4)
        await asked.completed()
        assert asked.ids == [10, 11, 12, 13]


async def test_another_relay_is_fed_kv_only_and_gets_all_ids() -> None:
    async with rig(relay=2) as running:
        asked = running.ask(max_tokens=5)
        started = await asked.started()
        first, second = (running.stages[name] for name in sorted(("r0", "r1"), key=lambda n: n != started.route.relay))
        p, r, m = await running.p.prefill(), await first.leg(), await running.m.leg()
        p.first_token(10)
        await r.hears("resume")
        r.tokens(1, 11)
        await asked.until(2)
        r.fail(StageFailed("relay crashed"))
        again, fresh = await running.p.prefill(), await second.leg()
        assert again.request.kv_only
        assert [target.transfer_id for target in again.request.targets] == [fresh.opening.transfer_id]
        resume = await fresh.hears("resume")
        assert (resume.first_index, list(resume.ids)) == (0, [10, 11])
        fresh.ready()
        fresh.tokens(2, 12)
        await asked.until(3)
        m.ready()
        assert list((await m.hears("resume")).ids) == [10, 11, 12]
        m.tokens(3, 13, 14)
        m.finished(5)
        await asked.completed()
        assert asked.ids == [10, 11, 12, 13, 14]


async def test_a_relay_without_kv_in_time_is_replaced_by_waiting_for_main() -> None:
    async with rig(relay_ready_s=0.1) as running:
        asked = running.ask(max_tokens=3)
        p, r, m = await legs_of(running)
        p.first_token(10)
        await r.hears("resume")
        await r.gone()
        resume = await m.hears("resume")
        assert list(resume.ids) == [10]
        m.ready()
        m.tokens(1, 11, 12)
        m.finished(3)
        completed = await asked.completed()
        assert "relay_late" in completed.report.fallbacks


async def test_main_lost_before_the_hand_off_is_fed_again_elsewhere() -> None:
    async with rig(main=2) as running:
        asked = running.ask(max_tokens=5)
        started = await asked.started()
        first, second = (running.stages[name] for name in sorted(("m0", "m1"), key=lambda n: n != started.route.main))
        p, r, m = await running.p.prefill(), await running.r.leg(), await first.leg()
        p.first_token(10)
        await r.hears("resume")
        r.tokens(1, 11)
        await asked.until(2)
        m.fail(StageFailed("main crashed"))
        again, fresh = await running.p.prefill(), await second.leg()
        assert again.request.kv_only
        assert fresh.unheard == 0
        fresh.ready()
        assert list((await fresh.hears("resume")).ids) == [10, 11]
        fresh.tokens(2, 12, 13, 14)
        fresh.finished(5)
        await asked.completed()
        assert asked.ids == [10, 11, 12, 13, 14]


async def test_main_lost_after_the_hand_off_is_fed_again_with_all_ids() -> None:
    async with rig(main=2) as running:
        asked = running.ask(max_tokens=5, pipeline=P_MD)
        started = await asked.started()
        first, second = (running.stages[name] for name in sorted(("m0", "m1"), key=lambda n: n != started.route.main))
        p, m = await running.p.prefill(), await first.leg()
        p.first_token(10)
        await m.hears("resume")
        m.ready()
        m.tokens(1, 11, 12)
        await asked.until(3)
        m.fail(StageFailed("main crashed"))
        await running.p.prefill()
        fresh = await second.leg()
        assert list((await fresh.hears("resume")).ids) == [10, 11, 12]
        fresh.tokens(3, 13, 14)
        fresh.finished(5)
        await asked.completed()
        assert asked.ids == [10, 11, 12, 13, 14]


async def test_without_any_main_left_a_relay_ends_the_answer_as_a_counted_fallback() -> None:
    async with rig() as running:
        asked = running.ask(max_tokens=4, pipeline=P_MD)
        p, m = await running.p.prefill(), await running.m.leg()
        p.first_token(10)
        await m.hears("resume")
        m.tokens(1, 11)
        await asked.until(2)
        m.fail(StageFailed("main crashed"))
        r = await running.r.leg()
        assert r.opening.output_budget == 4
        assert list((await r.hears("resume")).ids) == [10, 11]
        r.ready()
        r.tokens(2, 12, 13)
        r.finished(4)
        completed = await asked.completed()
        assert asked.ids == [10, 11, 12, 13]
        assert "main_unavailable" in completed.report.fallbacks


async def test_no_stage_for_a_lost_leg_is_unavailable_and_names_it() -> None:
    async with rig(relay=0) as running:
        asked = running.ask(pipeline=P_MD)
        p, m = await running.p.prefill(), await running.m.leg()
        p.first_token(10)
        await m.hears("resume")
        m.fail(StageFailed("main crashed"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked.completed()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "relay decode" in str(caught.value.details()) or "main decode" in str(caught.value.details())
        await p.gone()


async def test_prefill_lost_before_the_first_token_is_planned_again_with_new_transfer_ids() -> None:
    async with rig(prefill=2) as running:
        asked = running.ask(max_tokens=2)
        started = await asked.started()
        first, second = (running.stages[n] for n in sorted(("p0", "p1"), key=lambda n: n != started.route.prefill))
        p, r, m = await first.prefill(), await running.r.leg(), await running.m.leg()
        p.fail(StageFailed("prefill crashed"))
        await r.gone()
        await m.gone()
        p, r2, m2 = await second.prefill(), await running.r.leg(), await running.m.leg()
        assert {r.opening.transfer_id, m.opening.transfer_id}.isdisjoint(
            {r2.opening.transfer_id, m2.opening.transfer_id}
        )
        assert not p.request.kv_only
        p.first_token(10)
        await r2.hears("resume")
        r2.tokens(1, 11)
        r2.finished(2)
        completed = await asked.completed()
        assert "planned_again" in completed.report.fallbacks
        assert len([reply for reply in asked.replies if reply.HasField("started")]) == 1
        await m2.hears("extend")
        m2.drained()


async def test_prefill_lost_after_the_first_token_feeds_the_legs_that_lack_kv() -> None:
    async with rig(prefill=2) as running:
        asked = running.ask(max_tokens=4)
        started = await asked.started()
        first, second = (running.stages[n] for n in sorted(("p0", "p1"), key=lambda n: n != started.route.prefill))
        p, r, m = await first.prefill(), await running.r.leg(), await running.m.leg()
        p.first_token(10)
        await r.hears("resume")
        r.ready()
        r.tokens(1, 11)
        await asked.until(2)
        p.fail(StageFailed("prefill crashed"))
        again, fresh = await second.prefill(), await running.m.leg()
        assert again.request.kv_only
        assert [target.role for target in again.request.targets] == [common_pb2.ROLE_MAIN]
        await m.gone()
        r.tokens(2, 12)
        await asked.until(3)
        fresh.ready()
        assert list((await fresh.hears("resume")).ids) == [10, 11, 12]
        fresh.tokens(3, 13)
        fresh.finished(4)
        await asked.completed()
        assert asked.ids == [10, 11, 12, 13]


async def test_a_push_that_fails_is_made_again_for_that_leg_only() -> None:
    async with rig(main=2) as running:
        asked = running.ask(max_tokens=3)
        p, r = await running.p.prefill(), await running.r.leg()
        p.first_token(10)
        await r.hears("resume")
        r.ready()
        r.tokens(1, 11)
        await asked.until(2)
        p.push_ended(Role.MAIN, "failed")
        again = await running.p.prefill()
        assert again.request.kv_only
        assert r.closed.is_set() is False
        r.tokens(2, 12)
        r.finished(3)
        completed = await asked.completed()
        assert "main_push_failed" in completed.report.fallbacks
        mains, legs = (running.stages["m0"], running.stages["m1"]), []
        async with asyncio.timeout(2):
            while len(legs) < 2:  # the one whose push failed, and the one in its place, maybe on the same stage
                legs += [await stage.leg() for stage in mains if stage.legs_waiting]
                await asyncio.sleep(0.005)
        for leg in legs:
            leg.drained()


async def test_a_full_stage_is_avoided_and_if_there_is_no_other_the_client_is_told_to_retry() -> None:
    async with rig() as running:
        running.m.refusal = Overloaded("m0 is full", retry_after_s=2.5)
        asked = running.ask()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked.completed()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    async with rig(main=2) as running:
        running.stages["m0"].refusal = Overloaded("m0 is full")
        for _ in range(2):  # whoever's turn it is
            asked = running.ask(max_tokens=2, pipeline=P_MD)
            m = await running.stages["m1"].leg()
            p = await running.p.prefill()
            while p.request.targets[0].instance_id != "m1":
                p = await running.p.prefill()
            p.first_token(10)
            await m.hears("resume")
            m.tokens(1, 11)
            m.finished(2)
            await asked.completed()


async def test_a_main_that_was_full_after_the_first_token_is_asked_again_when_it_said() -> None:
    async with rig(relay=0) as running:
        asked = running.ask(max_tokens=3, pipeline=P_MD)
        p, m = await running.p.prefill(), await running.m.leg()
        p.first_token(10)
        await m.hears("resume")
        m.fail(Overloaded("m0 is full", retry_after_s=0.05))
        again = await running.m.leg()
        resume = await again.hears("resume")
        assert (resume.first_index, list(resume.ids)) == (0, [10])
        again.tokens(1, 11, 12)
        again.finished(3)
        completed = await asked.completed()
        assert "main_full" in completed.report.fallbacks


async def test_a_fleet_that_stays_full_tells_the_client_to_retry_not_that_it_is_gone() -> None:
    async with rig() as running:
        asked = running.ask(max_tokens=3, pipeline=P_MD)
        p, m = await running.p.prefill(), await running.m.leg()
        p.first_token(10)
        await m.hears("resume")
        for stage in (running.r, running.m):
            stage.refusal = Overloaded("full", retry_after_s=0.05)
        m.fail(Overloaded("full", retry_after_s=0.05))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked.completed()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("first_index", [4, 2])
async def test_a_stage_that_skips_or_repeats_an_index_is_not_believed(first_index: int) -> None:
    async with rig() as running:
        asked = running.ask(max_tokens=5)
        _, r, m = await relaying(running, asked)
        r.tokens(first_index, 99)
        assert list((await m.hears("resume")).ids) == [10, 11, 12]
        await r.gone()
        m.tokens(3, 13, 14)
        m.finished(5)
        completed = await asked.completed()
        assert asked.ids == [10, 11, 12, 13, 14]
        assert "relay_violation" in completed.report.fallbacks


@pytest.mark.parametrize("back", ["before the leg has noticed", "after it"])
async def test_a_main_that_was_out_of_reach_and_is_back_is_fed_again(back: str) -> None:
    async with rig() as running:
        asked = running.ask(max_tokens=5)
        _, r, m = await relaying(running, asked)
        running.m.leave()
        if back == "before the leg has noticed":
            await joined_again(running)
        m.fail(StageFailed("out of reach"))
        if back == "after it":
            await joined_again(running)
        again, fresh = await running.p.prefill(), await running.m.leg()
        assert again.request.kv_only
        r.tokens(3, 13)
        await asked.until(4)
        fresh.ready()
        assert list((await fresh.hears("resume")).ids) == [10, 11, 12, 13]
        fresh.tokens(4, 14)
        fresh.finished(5)
        await asked.completed()
        assert asked.ids == [10, 11, 12, 13, 14]


async def joined_again(running: Rig) -> None:
    """m0's load stream was ended, and is open again."""
    async with asyncio.timeout(WAIT_S):
        while not any(v.instance_id == "m0" and v.joins == 2 for v in running.router.fleet.views()):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
