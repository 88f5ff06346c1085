"""How an answer ends, for the client and for the legs: at the relay, by its client, by a rule or a deadline."""

import asyncio
import gc

import grpc
import pytest

from kvrelay.errors import StageFailed
from kvrelay.proto.v1 import common_pb2
from kvrelay.types import FinishReason, Role
from services.router.conductor import Conductor
from services.router.feeding import Feeder
from services.router.route import Route
from tests.unit.router.rig import CATCH_UP, P_MD, P_RLD, legs_of, relaying, rig


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
        assert running.router.leftovers()["draining"] == 1
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
        assert completed.report.reason == "singular-cut"
        assert completed.report.route.reason == "forced"
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
        asked = running.ask(prompt=4, max_tokens=1500, pipeline=P_RLD)
        p, r = await running.p.prefill(), await running.r.leg()
        p.first_token(10)
        await r.hears("resume")
        for index in range(1, 1500):
            r.tokens(index, 11 + index % 100)
        r.finished(1500)
        completed = await asked.completed()
        assert completed.usage.completion_tokens == 1500


async def test_a_client_that_never_reads_loses_its_legs_at_its_deadline() -> None:
    async with rig(client_backlog_tokens=64) as running:
        running.ask(prompt=4, max_tokens=4000, pipeline=P_RLD, timeout=0.5)
        p, r = await running.p.prefill(), await running.r.leg()
        p.first_token(10)
        await r.hears("resume")
        for index in range(1, 3000):
            r.tokens(index, 11)
        await asyncio.gather(p.gone(), r.gone())


async def test_a_cancel_in_the_tick_of_the_completion_or_near_it_leaves_nothing_and_is_counted_once() -> None:
    async with rig() as running:
        for ticks in range(16):
            asked = running.ask(max_tokens=3, pipeline=P_MD)
            p, m = await running.p.prefill(), await running.m.leg()
            p.first_token(10)
            await m.hears("resume")
            m.ready()
            await asked.until(1)
            m.tokens(1, 11, 12)
            m.finished(3)
            for _ in range(ticks):
                await asyncio.sleep(0)
            asked.call.cancel()
            await asyncio.gather(p.gone(), m.gone())
            await running.settled()
        families = running.router.rooms.metrics.outcomes.collect()
        ends = [sample for family in families for sample in family.samples if sample.name.endswith("_total")]
        assert sum(sample.value for sample in ends) == 16
        assert {sample.labels["outcome"] for sample in ends} <= {"CANCELLED", "length"}


@pytest.mark.parametrize("paused", [False, True])
async def test_a_main_that_never_gets_ready_holds_nothing_past_the_clients_deadline(paused: bool) -> None:
    async with rig() as running:
        asked = running.ask(timeout=1.5)
        p, r, m = await relaying(running, asked)
        if paused:
            r.paused(3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked.completed()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert asked.ids == [10, 11, 12]
        await asyncio.gather(p.gone(), r.gone(), m.gone())


async def test_a_decode_stage_alone_that_never_gets_ready_holds_nothing_past_the_clients_deadline() -> None:
    async with rig() as running:
        asked = running.ask(timeout=1.5, pipeline=P_MD)
        p, m = await running.p.prefill(), await running.m.leg()
        p.first_token(10)
        await m.hears("resume")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asked.completed()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert asked.ids == [10]
        await asyncio.gather(p.gone(), m.gone())


async def test_open_legs_are_leftovers_until_they_are_closed() -> None:
    async with rig() as running:
        asked = running.ask()
        await legs_of(running)
        assert running.router.leftovers() == {"in_flight": 1, "legs": 3}
        asked.call.cancel()


async def test_a_request_whose_legs_cannot_be_opened_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(feeder: Feeder, route: Route) -> dict[Role, int]:
        raise StageFailed("it has just left")

    monkeypatch.setattr(Feeder, "open", gone)
    async with rig() as running:
        asked = running.ask()
        with pytest.raises(grpc.aio.AioRpcError, match="it has just left"):
            await asked.completed()
        assert sum(running.router.rooms.tally.requests.values()) == 1


async def test_a_request_that_has_ended_is_freed_without_the_collector() -> None:
    async with rig() as running:
        gc.collect()  # what other tests have left
        gc.disable()
        try:
            asked = running.ask(max_tokens=3)
            p, r, m = await relaying(running, asked)
            r.finished(3)
            await asked.completed()
            await m.hears("extend")
            m.drained()
            for stream in (p, r, m):
                stream.end()
            await running.settled()
            left = [one for one in gc.get_objects() if type(one) is Conductor]
        finally:
            gc.enable()
        assert not left
