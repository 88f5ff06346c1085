"""Who speaks when: every order in which legs can get ready and ids be handed over, by scripted stages."""

import asyncio

from kvrelay.errors import StageFailed
from kvrelay.proto.v1 import router_pb2
from tests.unit.router.rig import CATCH_UP, MD, P_MD, P_RLD, legs_of, relaying, rig


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


async def test_main_takes_over_right_after_a_token_of_the_relay() -> None:
    async with rig(turn_wait_s=30.0) as running:
        asked = running.ask(max_tokens=6)
        _, r, m = await relaying(running, asked)
        m.ready()
        await asyncio.sleep(0.05)
        r.tokens(3, 13)
        resume = await m.hears("resume")
        assert (resume.first_index, list(resume.ids)) == (0, [10, 11, 12, 13])
        await r.hears("stop")
        r.stopped(4)
        m.tokens(4, 14, 15)
        m.finished(6)
        await asked.completed()
        assert asked.ids == [10, 11, 12, 13, 14, 15]


async def test_a_relay_that_pauses_or_dies_while_main_waits_for_its_turn_gives_it_at_once() -> None:
    for last in ("paused", "lost"):
        async with rig(turn_wait_s=30.0) as running:
            asked = running.ask(max_tokens=4)
            _, r, m = await relaying(running, asked)
            m.ready()
            await asyncio.sleep(0.05)
            if last == "paused":
                r.paused(3)
            else:
                r.fail(StageFailed("died"))
            assert list((await m.hears("resume")).ids) == [10, 11, 12]
            if last == "paused":
                await r.hears("stop")
                r.stopped(3)
            m.tokens(3, 13)
            m.finished(4)
            await asked.completed()
            assert asked.ids == [10, 11, 12, 13]


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


async def test_the_gap_before_a_run_of_tokens_is_shared_by_them() -> None:
    async with rig(max_draining=0) as running:
        asked = running.ask(max_tokens=6)
        _, r, _ = await relaying(running, asked)
        r.tokens(3, 13, 14, 15)
        r.finished(6)
        await asked.completed()
        value = running.router.rooms.metrics.registry.get_sample_value
        assert value("kvrelay_itl_seconds_count", {"source": "relay"}) == 5
