"""Every order that a race can take, forced by scripted stages behind real gRPC."""

import asyncio

import grpc
import pytest

from kvrelay.errors import Overloaded, StageFailed
from kvrelay.proto.v1 import common_pb2, router_pb2
from kvrelay.types import FinishReason, Role
from tests.fakes_stages import FakeLeg, FakePrefill
from tests.unit.router.rig import CATCH_UP, MD, P_MD, P_RLD, Asked, Rig, rig


async def legs_of(running: Rig) -> tuple[FakePrefill, FakeLeg, FakeLeg]:
    """The three legs of a relayed request, as the stages see them."""
    return await running.p.prefill(), await running.r.leg(), await running.m.leg()


async def relaying(running: Rig, asked: Asked) -> tuple[FakePrefill, FakeLeg, FakeLeg]:
    """First token 10 from P, then 11 and 12 from the relay."""
    p, r, m = await legs_of(running)
    p.first_token(10)
    resume = await r.hears("resume")
    assert (resume.first_index, list(resume.ids)) == (0, [10])
    r.ready()
    r.tokens(1, 11, 12)
    await asked.until(3)
    return p, r, m


async def test_all_legs_are_opened_at_once_with_one_transfer_id_each() -> None:
    async with rig() as running:
        asked = running.ask(prompt=33)
        p, r, m = await legs_of(running)
        targets = {target.transfer_id for target in p.request.targets}
        assert targets == {r.opening.transfer_id, m.opening.transfer_id}
        assert list(p.request.prompt_ids) == list(r.opening.prompt_ids) == list(m.opening.prompt_ids) == list(range(33))
        assert len(m.opening.block_hashes) == 2
        assert r.opening.HasField("output_budget")
        assert not m.opening.HasField("output_budget")
        assert m.opening.sampling.seed == 1
        asked.call.cancel()


async def test_main_ready_before_the_first_token_skips_the_relay() -> None:
    async with rig() as running:
        asked = running.ask(max_tokens=3)
        p, r, m = await legs_of(running)
        m.ready()
        await asyncio.sleep(0.05)
        p.first_token(10)
        resume = await m.hears("resume")
        assert (resume.first_index, list(resume.ids)) == (0, [10])
        await r.gone()
        m.tokens(1, 11, 12)
        m.finished(3)
        completed = await asked.completed()
        assert asked.ids == [10, 11, 12]
        assert "relay_skipped" in completed.report.fallbacks
        assert completed.report.pipeline == P_MD


async def test_main_ready_before_the_relays_first_token_skips_the_relay() -> None:
    async with rig() as running:
        asked = running.ask(max_tokens=3)
        p, r, m = await legs_of(running)
        p.first_token(10)
        await r.hears("resume")
        m.ready()
        resume = await m.hears("resume")
        assert list(resume.ids) == [10]
        r.tokens(1, 99)
        m.tokens(1, 11, 12)
        m.finished(3)
        await asked.completed()
        assert asked.ids == [10, 11, 12]


async def test_one_shot_hands_over_all_ids_and_drops_what_the_relay_says_later() -> None:
    async with rig() as running:
        asked = running.ask(max_tokens=6)
        _, r, m = await relaying(running, asked)
        m.ready()
        resume = await m.hears("resume")
        assert (resume.first_index, list(resume.ids)) == (0, [10, 11, 12])
        await r.hears("stop")
        r.tokens(3, 77, 78)
        r.stopped(5)
        await r.gone()
        m.tokens(3, 13, 14, 15)
        m.finished(6)
        completed = await asked.completed()
        assert asked.ids == [10, 11, 12, 13, 14, 15]
        assert completed.report.relay_dropped == 2
        assert completed.report.handoff_ids == 3
        assert completed.report.HasField("handoff_stall_ms")
        assert (completed.usage.relay_tokens, completed.usage.main_tokens) == (2, 3)


async def test_catch_up_extends_while_the_relay_goes_on() -> None:
    async with rig(handoff_tokens=1, handoff_rounds=3) as running:
        asked = running.ask(max_tokens=8, mode=CATCH_UP)
        _, r, m = await relaying(running, asked)
        m.ready()
        extend = await m.hears("extend")
        assert (extend.first_index, list(extend.ids), extend.final) == (0, [10, 11, 12], False)
        r.tokens(3, 13, 14)
        await asked.until(5)
        m.extended(3)
        extend = await m.hears("extend")
        assert (extend.first_index, list(extend.ids)) == (3, [13, 14])
        r.tokens(5, 15)
        await asked.until(6)
        m.extended(5)
        resume = await m.hears("resume")
        assert (resume.first_index, list(resume.ids)) == (5, [15])
        await r.hears("stop")
        r.stopped(6)
        m.tokens(6, 16, 17)
        m.finished(8)
        completed = await asked.completed()
        assert asked.ids == list(range(10, 18))
        assert completed.report.handoff_rounds == 2
        assert completed.report.handoff_mode == CATCH_UP


async def test_a_resume_without_new_ids_opens_the_next_step() -> None:
    async with rig(handoff_tokens=1, handoff_rounds=3) as running:
        asked = running.ask(max_tokens=5, mode=CATCH_UP)
        _, r, m = await relaying(running, asked)
        m.ready()
        await m.hears("extend")
        m.extended(3)
        resume = await m.hears("resume")
        assert (resume.first_index, list(resume.ids)) == (3, [])
        m.tokens(3, 13, 14)
        m.finished(5)
        await r.hears("stop")
        r.stopped(3)
        await asked.completed()
        assert asked.ids == [10, 11, 12, 13, 14]


async def test_an_end_at_the_relay_while_an_extend_is_in_flight_drains_to_main() -> None:
    async with rig(handoff_tokens=1) as running:
        asked = running.ask(max_tokens=5, mode=CATCH_UP)
        _, r, m = await relaying(running, asked)
        m.ready()
        await m.hears("extend")
        r.tokens(3, 13, 14)
        r.finished(5)
        completed = await asked.completed()
        assert asked.ids == [10, 11, 12, 13, 14]
        assert completed.reason == common_pb2.FINISH_REASON_LENGTH
        extend = await m.hears("extend")
        assert (extend.first_index, list(extend.ids), extend.final) == (3, [13, 14], True)
        m.extended(3)
        m.drained()
        await running.settled()


@pytest.mark.parametrize("how", ["eos", "max_tokens", "stop_string"])
async def test_an_end_at_the_relay_before_main_has_kv_drains_to_main(how: str) -> None:
    async with rig() as running:
        stop = ["d"] if how == "stop_string" else []
        asked = running.ask(max_tokens=4 if how == "max_tokens" else 50, stop=stop)
        _, r, m = await relaying(running, asked)
        last = {"eos": 257, "max_tokens": 13, "stop_string": ord("d")}[how]
        r.tokens(3, last)
        if how != "stop_string":
            r.finished(4, FinishReason.EOS if how == "eos" else FinishReason.LENGTH)
        completed = await asked.completed()
        assert asked.ids == [10, 11, 12, last]
        assert completed.stop_string == ("d" if how == "stop_string" else "")
        extend = await m.hears("extend")
        assert (extend.first_index, list(extend.ids), extend.final) == (0, [10, 11, 12, last], True)
        assert running.router.leftovers() == {"draining": 1}
        m.ready()
        m.drained()
        await r.gone()


async def test_an_end_at_the_first_token_drains_to_main_and_closes_the_relay() -> None:
    async with rig() as running:
        asked = running.ask()
        p, r, m = await legs_of(running)
        p.first_token(257)
        p.finished(FinishReason.EOS)
        completed = await asked.completed()
        assert completed.usage.prefill_tokens == 1
        assert completed.reason == common_pb2.FINISH_REASON_EOS
        extend = await m.hears("extend")
        assert (list(extend.ids), extend.final) == ([257], True)
        await r.gone()
        m.drained()


async def test_finished_is_a_valid_answer_to_stop() -> None:
    async with rig() as running:
        asked = running.ask(max_tokens=4)
        _, r, m = await relaying(running, asked)
        m.ready()
        await m.hears("resume")
        await r.hears("stop")
        r.tokens(3, 13)
        r.finished(4)
        m.tokens(3, 13)
        m.finished(4)
        completed = await asked.completed()
        assert asked.ids == [10, 11, 12, 13]
        assert completed.usage.main_tokens == 1


async def test_a_stop_string_across_the_hand_off_ends_main_and_drops_the_rest() -> None:
    async with rig() as running:
        asked = running.ask(stop=["yz"])
        p, r, m = await legs_of(running)
        p.first_token(ord("x"))
        await r.hears("resume")
        r.tokens(1, ord("y"))
        await asyncio.sleep(0.05)
        m.ready()
        await m.hears("resume")
        m.tokens(2, ord("z"), ord("!"))
        completed = await asked.completed()
        assert asked.ids == [ord("x"), ord("y"), ord("z")]
        assert "".join(reply.output.text for reply in asked.replies) + completed.text == "x"
        assert completed.reason == common_pb2.FINISH_REASON_STOP_STRING
        await m.gone()
        await r.gone()


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
        for stage in (running.stages["m0"], running.stages["m1"]):
            if stage.calls:
                (await stage.leg()).drained()


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


async def test_local_prefill_samples_index_0_at_main_decode() -> None:
    async with rig() as running:
        asked = running.ask(max_tokens=2, pipeline=MD)
        m = await running.m.leg()
        assert m.opening.local_prefill
        assert m.opening.transfer_id == ""
        resume = await m.hears("resume")
        assert (resume.first_index, list(resume.ids)) == (0, [])
        m.tokens(0, 10, 11)
        m.finished(2)
        completed = await asked.completed()
        assert completed.usage.main_tokens == 2
        assert completed.report.pipeline == MD
        assert running.p.calls == running.r.calls == 0


async def test_a_relay_alone_has_room_for_the_whole_answer() -> None:
    async with rig(relay_budget=2) as running:
        asked = running.ask(max_tokens=3, pipeline=P_RLD)
        p, r = await running.p.prefill(), await running.r.leg()
        assert r.opening.output_budget == 3
        p.first_token(10)
        await r.hears("resume")
        r.tokens(1, 11, 12)
        r.finished(3)
        await asked.completed()
        assert running.m.calls == 0


async def test_a_paused_relay_waits_for_main() -> None:
    async with rig(relay_budget=3) as running:
        asked = running.ask(max_tokens=4)
        _, r, m = await relaying(running, asked)
        r.paused(3)
        m.ready()
        assert list((await m.hears("resume")).ids) == [10, 11, 12]
        await r.hears("stop")
        r.stopped(3)
        m.tokens(3, 13)
        m.finished(4)
        completed = await asked.completed()
        assert "relay_paused" in completed.report.fallbacks


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


async def test_the_baselines_hold_the_first_token_until_decode_has_the_kv() -> None:
    async with rig(policy="pd-remote") as running:
        asked = running.ask(max_tokens=2, pipeline=router_pb2.PIPELINE_UNSPECIFIED)
        started = await asked.started()
        assert started.route.reason == "pd-remote"
        p, m = await running.p.prefill(), await running.m.leg()
        p.first_token(10)
        await m.hears("resume")
        first = asyncio.ensure_future(asked.until(1))
        await asyncio.sleep(0.1)
        assert not first.done()
        m.ready()
        await first
        m.tokens(1, 11)
        m.finished(2)
        completed = await asked.completed()
        assert completed.usage.completion_tokens == 2


@pytest.mark.parametrize("phase", ["opened", "first token", "relaying", "ready", "extending", "handed over", "paused"])
async def test_a_client_that_leaves_closes_every_leg_at_once(phase: str) -> None:
    async with rig(handoff_tokens=1) as running:
        asked = running.ask(mode=CATCH_UP if phase == "extending" else 0)
        p, r, m = await legs_of(running)
        if phase != "opened":
            p.first_token(10)
            await r.hears("resume")
        if phase in ("relaying", "extending", "handed over", "paused"):
            r.tokens(1, 11, 12)
            await asked.until(3)
        if phase == "paused":
            r.paused(3)
        if phase in ("ready", "extending", "handed over"):
            m.ready()
            await m.hears("extend" if phase == "extending" else "resume")
        asked.call.cancel()
        await asyncio.gather(p.gone(), r.gone(), m.gone())


async def test_the_singular_rule_cuts_a_push_that_needs_too_long() -> None:
    async with rig(singular_cut_s=1.0, wan_rate_bytes_per_s=1e6) as running:
        asked = running.ask(max_tokens=3)
        p, r, m = await legs_of(running)
        p.progress(Role.MAIN, 1_000_000, 3_000_000)
        p.first_token(10)
        await r.hears("resume")
        r.tokens(1, 11, 12)
        r.finished(3)
        completed = await asked.completed()
        assert "singular_cut" in completed.report.fallbacks
        assert completed.report.pipeline == P_RLD
        await m.gone()
        await p.gone()


async def test_a_drain_ends_at_its_deadline() -> None:
    async with rig(drain_s=0.1) as running:
        asked = running.ask(max_tokens=3)
        p, r, m = await legs_of(running)
        p.first_token(10)
        await r.hears("resume")
        r.tokens(1, 11, 12)
        r.finished(3)
        await asked.completed()
        await m.gone()
        await p.gone()


async def test_the_gap_before_a_run_of_tokens_is_shared_by_them() -> None:
    async with rig(max_draining=0) as running:
        asked = running.ask(max_tokens=6)
        _, r, _ = await relaying(running, asked)
        r.tokens(3, 13, 14, 15)
        r.finished(6)
        await asked.completed()
        value = running.router.rooms.metrics.registry.get_sample_value
        assert value("kvrelay_itl_seconds_count", {"source": "relay"}) == 5


async def test_a_full_drain_group_closes_the_legs() -> None:
    async with rig(max_draining=0) as running:
        asked = running.ask(max_tokens=2)
        p, r, m = await legs_of(running)
        p.first_token(10)
        await r.hears("resume")
        r.tokens(1, 11)
        r.finished(2)
        await asked.completed()
        await m.gone()


async def test_a_slow_client_bounds_what_is_read_from_the_stages() -> None:
    async with rig(client_backlog_tokens=64) as running:
        asked = running.ask(prompt=4, max_tokens=4000, pipeline=P_RLD)
        p, r = await running.p.prefill(), await running.r.leg()
        p.first_token(10)
        await r.hears("resume")
        for index in range(1, 4000):
            r.tokens(index, 11 + index % 100)
        r.finished(4000)
        completed = await asked.completed()
        assert completed.usage.completion_tokens == 4000


async def test_a_client_that_never_reads_loses_its_legs_at_its_deadline() -> None:
    async with rig(client_backlog_tokens=64) as running:
        running.ask(prompt=4, max_tokens=4000, pipeline=P_RLD, timeout=0.5)
        p, r = await running.p.prefill(), await running.r.leg()
        p.first_token(10)
        await r.hears("resume")
        for index in range(1, 3000):
            r.tokens(index, 11)
        await asyncio.gather(p.gone(), r.gone())
