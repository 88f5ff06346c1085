"""What dies, stalls or leaves: the client gets the exact rest or a clear status, and every stage lets go."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from kvrelay.engine.reference import generate_reference
from kvrelay.model.weights import LoadedModel, load_model
from kvrelay.proto.v1 import common_pb2, router_pb2
from kvrelay.types import Sampling
from kvrelay.wan.emulator import Outage
from tests.pipeline.topology import Got, Topology, ask, collect, status_of, topology

P_RLD_MD, P_MD = router_pb2.PIPELINE_P_RLD_MD, router_pb2.PIPELINE_P_MD
P_RLD, MD = router_pb2.PIPELINE_P_RLD, router_pb2.PIPELINE_MD
PROMPT = random.Random(1).choices(range(256), k=100)
SLOW_WAN = {"rate": "60KB", "delay_ms": 5.0}
# A decode step of 10 ms, so that answers take long enough to be interrupted.
PACED = {"pace": "fixed=10,token=0,context=0,sequence=0"}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("tiny", device="cpu", dtype="", block_tokens=16)


def reference(loaded: LoadedModel, prompt: list[int], max_tokens: int) -> list[int]:
    sampling = Sampling(seed=1, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return list(generate_reference(loaded, prompt, sampling, with_margins=False).ids)


def asked(max_tokens: int, pipeline: router_pb2.Pipeline = P_RLD_MD, **more: Any) -> router_pb2.GenerateRequest:
    return ask(PROMPT, max_tokens=max_tokens, pipeline=pipeline, ignore_eos=True, **more)


class Watched:
    """A running request whose replies are read one by one, so that a test can act in between."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.replies: list[router_pb2.GenerateReply] = []

    async def until(self, reached: Callable[[router_pb2.GenerateReply], bool]) -> None:
        async for reply in self.call:
            self.replies.append(reply)
            if reached(reply):
                return
        raise AssertionError("the stream ended before that")

    async def rest(self) -> Got:
        async def every() -> AsyncIterator[router_pb2.GenerateReply]:
            for reply in self.replies:
                yield reply
            async for reply in self.call:
                yield reply

        return await collect(every())


def tokens_from(source: common_pb2.Source, count: int = 1) -> Callable[[router_pb2.GenerateReply], bool]:
    seen = [0]

    def reached(reply: router_pb2.GenerateReply) -> bool:
        if reply.output.tokens.source == source:
            seen[0] += len(reply.output.tokens.ids)
        return seen[0] >= count

    return reached


def started(reply: router_pb2.GenerateReply) -> bool:
    return reply.HasField("started")


PHASES: dict[str, Callable[[], Callable[[router_pb2.GenerateReply], bool]]] = {
    "started": lambda: started,
    "first token": lambda: tokens_from(common_pb2.SOURCE_PREFILL),
    "relaying": lambda: tokens_from(common_pb2.SOURCE_RELAY, 3),
    "handed over": lambda: tokens_from(common_pb2.SOURCE_MAIN, 3),
}


@asynccontextmanager
async def slow(**wanted: Any) -> AsyncIterator[Topology]:
    async with topology(wan=SLOW_WAN, stage={**PACED, "shutdown_grace_s": 0.0}, **wanted) as running:
        yield running


@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_leaves_releases_every_stage(phase: str) -> None:
    async with slow() as running:
        watched = Watched(running.stub.Generate(asked(300)))
        await watched.until(PHASES[phase]())
        watched.call.cancel()
        await running.settled()


async def test_a_deadline_releases_every_stage() -> None:
    async with slow() as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.generate(asked(300), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await running.settled()


@pytest.mark.parametrize("mains", [1, 2])
async def test_a_relay_that_dies_costs_a_pause_only(loaded: LoadedModel, mains: int) -> None:
    async with slow(main=mains) as running:
        watched = Watched(running.stub.Generate(asked(110)))
        await watched.until(tokens_from(common_pb2.SOURCE_RELAY, 3))
        await running.stop(running.relay[0])
        got = await watched.rest()
        assert got.ids == reference(loaded, PROMPT, 110)
        assert "relay_lost" in got.report.fallbacks


async def test_another_relay_takes_over_from_one_that_dies(loaded: LoadedModel) -> None:
    async with slow(relay=2) as running:
        watched = Watched(running.stub.Generate(asked(110)))
        await watched.until(tokens_from(common_pb2.SOURCE_RELAY, 3))
        used = watched.replies[0].started.route.relay
        await running.stop(next(r for r in running.relay if r.description.instance_id == used))
        got = await watched.rest()
        assert got.ids == reference(loaded, PROMPT, 110)
        assert "fed_relay_again" in got.report.fallbacks


@pytest.mark.parametrize("phase", ["relaying", "handed over"])
async def test_another_main_takes_over_from_one_that_dies(loaded: LoadedModel, phase: str) -> None:
    async with slow(main=2) as running:
        watched = Watched(running.stub.Generate(asked(250)))
        await watched.until(PHASES[phase]())
        used = watched.replies[0].started.route.main
        await running.stop(next(m for m in running.main if m.description.instance_id == used))
        got = await watched.rest()
        assert got.ids == reference(loaded, PROMPT, 250)
        assert "fed_main_again" in got.report.fallbacks


async def test_without_another_main_the_client_gets_a_clear_status() -> None:
    async with slow(relay=0) as running:
        watched = Watched(running.stub.Generate(asked(130, P_MD)))
        await watched.until(tokens_from(common_pb2.SOURCE_MAIN, 3))
        await running.stop(running.main[0])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watched.rest()
        code, details = status_of(caught.value)
        assert code == "UNAVAILABLE"
        assert "decode" in details


async def test_a_relay_carries_on_when_the_only_main_is_gone(loaded: LoadedModel) -> None:
    async with slow() as running:
        watched = Watched(running.stub.Generate(asked(110)))
        await watched.until(tokens_from(common_pb2.SOURCE_RELAY, 2))
        await running.stop(running.main[0])
        got = await watched.rest()
        assert got.ids == reference(loaded, PROMPT, 110)
        assert got.report.pipeline == P_RLD
        assert "main_unavailable" in got.report.fallbacks


async def test_a_prefill_that_dies_after_the_first_token_is_replaced(loaded: LoadedModel) -> None:
    async with slow(prefill=2) as running:
        watched = Watched(running.stub.Generate(asked(110)))
        await watched.until(tokens_from(common_pb2.SOURCE_RELAY))
        used = watched.replies[0].started.route.prefill
        await running.stop(next(p for p in running.prefill if p.description.instance_id == used))
        got = await watched.rest()
        assert got.ids == reference(loaded, PROMPT, 110)
        assert got.report.pipeline == P_RLD_MD


async def test_a_prefill_that_dies_before_the_first_token_costs_a_delay(loaded: LoadedModel) -> None:
    pace = {"p": {"pace": "fixed=1500,token=0,context=0,sequence=0"}}  # longer than a stage takes to stop
    async with topology(prefill=2, wan=SLOW_WAN, per_role=pace) as running:
        watched = Watched(running.stub.Generate(asked(20)))
        await watched.until(started)
        used = watched.replies[0].started.route.prefill
        await running.stop(next(p for p in running.prefill if p.description.instance_id == used))
        got = await watched.rest()
        assert got.ids == reference(loaded, PROMPT, 20)
        assert "planned_again" in got.report.fallbacks


async def test_a_plan_made_again_without_a_relay_is_counted_as_such(loaded: LoadedModel) -> None:
    pace = {"p": {"pace": "fixed=1500,token=0,context=0,sequence=0"}}  # longer than two stages take to stop
    async with topology(
        prefill=2, wan=SLOW_WAN, per_role=pace, router={"wan_rate_bytes_per_s": 60_000, "stall_ms": 50}
    ) as running:
        watched = Watched(running.stub.Generate(asked(90, router_pb2.PIPELINE_UNSPECIFIED), timeout=60))
        await watched.until(started)
        route = watched.replies[0].started.route
        assert (route.pipeline, route.relay) == (P_RLD_MD, "r0")
        await running.stop(running.relay[0])
        await running.stop(next(p for p in running.prefill if p.description.instance_id == route.prefill))
        got = await watched.rest()
        assert got.ids == reference(loaded, PROMPT, 90)
        assert [one for one in got.report.fallbacks if one in ("planned_again", "no-relay")] == [
            "planned_again",
            "no-relay",
        ]
        assert running.router.rooms.tally.fallbacks["no-relay"] == 1


@pytest.mark.parametrize(("role", "leg"), [("prefill", "prefill"), ("main", "main decode")])
async def test_no_stage_for_a_leg_is_unavailable_at_once_and_names_the_leg(role: str, leg: str) -> None:
    async with topology(**{role: 0}) as running:  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.generate(ask(PROMPT, max_tokens=4), timeout=2)
        code, details = status_of(caught.value)
        assert code == "UNAVAILABLE"
        assert leg in details


async def test_an_answer_that_ends_at_the_relay_still_fills_main_decode() -> None:
    async with slow(router={"singular_cut_s": 30.0}) as running:
        got = await running.generate(asked(13))
        assert got.completed.usage.main_tokens == 0
        assert running.router.leftovers()["draining"] == 1
        async with asyncio.timeout(10):
            while running.router.leftovers():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        longer = [*PROMPT, *got.ids, 5]
        after = await running.generate(ask(longer, max_tokens=2, pipeline=MD))
        assert after.completed.usage.cached_main_tokens == 112  # KV of all ids but the last


async def test_a_push_that_would_hold_the_link_too_long_is_cut() -> None:
    async with slow(router={"singular_cut_s": 0.05, "wan_rate_bytes_per_s": 100_000}) as running:
        got = await running.generate(asked(12))
        assert "singular_cut" in got.report.fallbacks
        assert got.report.pipeline == P_RLD
        await running.settled()


async def test_a_relay_pauses_at_its_budget_and_main_goes_on(loaded: LoadedModel) -> None:
    async with slow(router={"relay_budget": 5}) as running:
        got = await running.generate(asked(40))
        assert got.ids == reference(loaded, PROMPT, 40)
        assert got.completed.usage.relay_tokens == 4
        assert "relay_paused" in got.report.fallbacks


async def test_a_stage_that_joins_later_is_used(loaded: LoadedModel) -> None:
    async with topology(main=2) as running:
        await running.stop(running.main[0])
        got = await running.generate(asked(10, P_MD))
        assert got.ids == reference(loaded, PROMPT, 10)
        assert got.started.route.main == "m1"


@pytest.mark.parametrize("phase", ["relaying", "handed over"])
async def test_main_decode_is_fed_again_when_the_wan_is_back(loaded: LoadedModel, phase: str) -> None:
    async with slow(router={"redial_max_s": 0.2}) as running:
        assert running.wan is not None
        watched = Watched(running.stub.Generate(asked(400)))
        await watched.until(PHASES[phase]())
        await running.wan.set_outage(Outage.RESET)
        await watched.until(tokens_from(common_pb2.SOURCE_RELAY, 5))
        await running.wan.set_outage(Outage.NONE)
        got = await watched.rest()
        assert got.ids == reference(loaded, PROMPT, 400)
        assert got.outputs[-1].tokens.source == common_pb2.SOURCE_MAIN
        assert "fed_main_again" in got.report.fallbacks


async def test_a_relay_at_its_budget_waits_for_the_wan(loaded: LoadedModel) -> None:
    async with slow(router={"redial_max_s": 0.2, "relay_budget": 20}) as running:
        assert running.wan is not None
        watched = Watched(running.stub.Generate(asked(60)))
        await watched.until(tokens_from(common_pb2.SOURCE_RELAY, 5))
        await running.wan.set_outage(Outage.RESET)
        await watched.until(tokens_from(common_pb2.SOURCE_RELAY, 14))
        await asyncio.sleep(0.5)
        await running.wan.set_outage(Outage.NONE)
        got = await watched.rest()
        assert got.ids == reference(loaded, PROMPT, 60)
        assert "relay_paused" in got.report.fallbacks


async def test_a_relay_at_its_budget_does_not_wait_for_ever() -> None:
    async with slow(router={"relay_budget": 20, "rejoin_wait_s": 0.3}) as running:
        assert running.wan is not None
        watched = Watched(running.stub.Generate(asked(60)))
        await watched.until(tokens_from(common_pb2.SOURCE_RELAY, 5))
        await running.wan.set_outage(Outage.RESET)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watched.rest()
        assert status_of(caught.value)[0] == "UNAVAILABLE"
        assert "main decode" in status_of(caught.value)[1]
