"""The router with real stages: routes, hits, baselines, load, Redis. Equality in depth: test_router_equality.py."""

import asyncio
import random
import signal

import grpc
import pytest
from prometheus_client import generate_latest

from kvrelay.engine.reference import generate_reference
from kvrelay.index.server import start_redis
from kvrelay.model.weights import LoadedModel, load_model
from kvrelay.proto.v1 import common_pb2, router_pb2
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.types import Sampling
from tests.pipeline.topology import Topology, ask, status_of, topology

P_RLD_MD, P_MD = router_pb2.PIPELINE_P_RLD_MD, router_pb2.PIPELINE_P_MD
P_RLD, MD = router_pb2.PIPELINE_P_RLD, router_pb2.PIPELINE_MD
PROMPT = random.Random(2).choices(range(256), k=400)
SLOW_WAN = {"rate": "400KB", "delay_ms": 5.0}
# The relay pauses at its budget, so that main decode always has something left to do.
PRIORS = {"wan_rate_bytes_per_s": 400_000, "wan_delay_ms": 5.0, "prefill_tokens_per_s": 20_000, "relay_budget": 60}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("tiny", device="cpu", dtype="", block_tokens=16)


def reference(loaded: LoadedModel, prompt: list[int], max_tokens: int, ignore_eos: bool = False) -> list[int]:
    sampling = Sampling(seed=1, max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos)
    return list(generate_reference(loaded, prompt, sampling, with_margins=False).ids)


async def drained(running: Topology) -> None:
    async with asyncio.timeout(10):
        while running.router.leftovers():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await running.settled()


@pytest.mark.parametrize("redis", [True, False])
async def test_a_chats_first_turn_is_relayed_and_its_next_crosses_little(loaded: LoadedModel, redis: bool) -> None:
    async with topology(redis=redis, wan=SLOW_WAN, router=PRIORS) as running:
        first = await running.generate(ask(PROMPT, max_tokens=160, ignore_eos=True))
        assert first.ids == reference(loaded, PROMPT, 160, ignore_eos=True)
        assert (first.report.route.pipeline, first.report.route.reason) == (P_RLD_MD, "kv-late")
        assert first.report.route.index_degraded is not redis
        assert first.completed.usage.relay_tokens > 0
        assert first.completed.usage.main_tokens > 0
        assert first.report.wan_bytes >= first.report.route.crossing_bytes > 0
        await drained(running)
        await asyncio.sleep(0.2)  # the stages' announcements reach the index

        turn = [*PROMPT, *first.ids, *range(40)]
        plan = await running.stub.Plan(ask(turn, max_tokens=20))
        assert plan.route.pipeline == MD
        second = await running.generate(ask(turn, max_tokens=20))
        assert second.ids == reference(loaded, turn, 20)
        assert (second.report.route.pipeline, second.report.route.reason) == (MD, "local-extend")
        assert second.completed.usage.cached_main_tokens == second.report.route.hit_main_tokens
        assert second.report.wan_bytes == 0


async def test_hits_in_the_route_are_those_that_the_stages_measure(loaded: LoadedModel) -> None:
    async with topology(redis=True) as running:
        await running.generate(ask(PROMPT, max_tokens=1, pipeline=P_MD))
        await drained(running)
        await asyncio.sleep(0.2)
        longer = [*PROMPT, *range(100)]
        got = await running.generate(ask(longer, max_tokens=8, pipeline=P_RLD_MD))
        assert got.ids == reference(loaded, longer, 8)
        route, usage = got.report.route, got.completed.usage
        assert (route.hit_prefill_tokens, route.hit_relay_tokens, route.hit_main_tokens) == (400, 0, 400)
        assert usage.cached_prefill_tokens == 400


async def test_redis_dies_and_comes_back_and_no_request_notices(loaded: LoadedModel) -> None:
    async with start_redis() as redis, topology(redis=redis.url) as running:
        await running.generate(ask(PROMPT[:64], max_tokens=4))
        redis.send(signal.SIGKILL)
        await redis.ended()
        degraded = await running.generate(ask(PROMPT[:80], max_tokens=4))
        assert degraded.ids == reference(loaded, PROMPT[:80], 4)
        assert degraded.report.route.index_degraded
        async with start_redis(redis.port), asyncio.timeout(15):
            while (await running.generate(ask(PROMPT[:80], max_tokens=2))).report.route.index_degraded:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


@pytest.mark.parametrize(("policy", "site"), [("pd-local", "a"), ("pd-remote", "b")])
async def test_a_baseline_runs_on_the_same_services(loaded: LoadedModel, policy: str, site: str) -> None:
    router = {**PRIORS, "policy": policy}
    async with topology(wan=SLOW_WAN, main_site=site, router=router) as running:
        got = await running.generate(ask(PROMPT, max_tokens=20))
        assert got.ids == reference(loaded, PROMPT, 20)
        assert got.report.route.reason == policy
        assert got.report.pipeline == P_MD
        moments = {event.name: event.at_ms for event in got.report.timeline}
        assert moments["first_token"] < moments["main_ready"]


async def test_two_requests_may_compute_the_same_prefix_at_once(loaded: LoadedModel) -> None:
    async with topology(wan=SLOW_WAN, router=PRIORS) as running:
        asked = [ask([*PROMPT, tail], max_tokens=30, pipeline=P_RLD_MD) for tail in (1, 1, 2)]
        got = await asyncio.gather(*(running.generate(one) for one in asked))
        for one, tail in zip(got, (1, 1, 2), strict=True):
            assert one.ids == reference(loaded, [*PROMPT, tail], 30)


async def test_preemption_after_the_hand_off_changes_no_token(loaded: LoadedModel) -> None:
    small = {"m": {"pool_tokens": 320}}
    async with topology(per_role=small) as running:
        prompts = [PROMPT[i : i + 60] for i in range(0, 180, 60)]
        asked = [ask(prompt, max_tokens=150, pipeline=P_MD, ignore_eos=True) for prompt in prompts]
        got = await asyncio.gather(*(running.generate(one) for one in asked))
        for one, prompt in zip(got, prompts, strict=True):
            assert one.ids == reference(loaded, prompt, 150, ignore_eos=True)
        assert running.main[0].core.driver.load().preemptions > 0


async def test_without_prefix_caches_everything_crosses_every_time(loaded: LoadedModel) -> None:
    async with topology(stage={"prefix_cache": False}) as running:
        for _ in range(2):
            got = await running.generate(ask(PROMPT, max_tokens=6))
            assert got.ids == reference(loaded, PROMPT, 6)
            assert got.completed.usage.cached_prefill_tokens == 0
            assert got.completed.usage.cached_main_tokens == 0
            assert got.report.route.hit_main_tokens == 0


async def test_text_in_text_out_and_logprobs_one_per_token(loaded: LoadedModel) -> None:
    tokenizer = load_tokenizer("tiny")
    async with topology() as running:
        got = await running.generate(ask("Once upon a time", max_tokens=20, logprobs=2))
        ids = tokenizer.encode("Once upon a time")
        assert got.started.prompt_tokens == len(ids)
        assert got.ids == reference(loaded, ids, 20)
        assert got.text == tokenizer.decode(got.ids)
        assert all(len(o.tokens.logprobs) == len(o.tokens.ids) for o in got.outputs)
        assert all(len(item.top) == 2 for o in got.outputs for item in o.tokens.logprobs)
        request = ask("Once upon a time", max_tokens=20)
        request.return_text = False
        silent = await running.generate(request)
        assert (silent.ids, silent.text) == (got.ids, "")
        reply = await running.stub.Tokenize(router_pb2.TokenizeRequest(prompt="Once upon a time"))
        assert list(reply.ids) == ids


async def test_a_seed_that_the_router_drew_gives_the_same_answer_again() -> None:
    async with topology() as running:
        request = ask(PROMPT[:50], max_tokens=20, temperature=1.0)
        request.sampling.ClearField("seed")
        first = await running.generate(request)
        request.sampling.seed = first.started.seed
        request.pipeline = P_RLD
        again = await running.generate(request)
        assert again.ids == first.ids


async def test_a_full_router_refuses_with_a_hint_and_harms_no_other(loaded: LoadedModel) -> None:
    async with topology(router={"max_in_flight": 1, "max_queued": 0}) as running:
        one = asyncio.ensure_future(running.generate(ask(PROMPT[:50], max_tokens=40)))
        async with asyncio.timeout(5):
            while not running.router.leftovers():  # noqa: ASYNC110
                await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.generate(ask(PROMPT[:50], max_tokens=4))
        code, details = status_of(caught.value)
        assert code == "RESOURCE_EXHAUSTED"
        assert "max_queued" in details
        assert (await one).ids == reference(loaded, PROMPT[:50], 40)


BAD: list[tuple[router_pb2.GenerateRequest, str, str]] = [
    (router_pb2.GenerateRequest(), "INVALID_ARGUMENT", "exactly one of"),
    (ask([999]), "INVALID_ARGUMENT", "token_ids.ids[0]"),
    (ask([1] * 4095, max_tokens=10), "INVALID_ARGUMENT", "sampling.max_tokens"),
    (ask([1] * 4096), "INVALID_ARGUMENT", "4095"),
    (ask([1], max_tokens=0), "INVALID_ARGUMENT", "sampling.max_tokens"),
    (router_pb2.GenerateRequest(prompt="x", n=2), "UNIMPLEMENTED", "n:"),
    (router_pb2.GenerateRequest(prompt="x", model="y"), "NOT_FOUND", "model"),
    (
        router_pb2.GenerateRequest(chat=router_pb2.Chat(messages=[router_pb2.ChatMessage(role="nobody")])),
        "INVALID_ARGUMENT",
        "chat.messages[0].role",
    ),
]


async def test_bad_input_gets_a_status_that_names_the_field_and_harms_no_other(loaded: LoadedModel) -> None:
    async with topology(relay=0) as running:
        good = asyncio.ensure_future(running.generate(ask(PROMPT[:50], max_tokens=60)))
        for request, code, text in BAD:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await running.generate(request, timeout=3)
            assert status_of(caught.value)[0] == code
            assert text in status_of(caught.value)[1]
        assert (await good).ids == reference(loaded, PROMPT[:50], 60)


async def test_what_happened_is_counted_where_a_person_sees_it() -> None:
    async with topology(wan=SLOW_WAN, router=PRIORS) as running:
        await running.generate(ask(PROMPT, max_tokens=160, ignore_eos=True))
        await running.generate(ask([*PROMPT, 1, 2, 3], max_tokens=10))
        fleet = await running.stub.GetFleet(router_pb2.GetFleetRequest())
        assert fleet.requests == {"p-rld-md/kv-late": 1, "md/local-extend": 1}
        text = generate_latest(running.router.rooms.metrics.registry).decode()
        assert 'kvrelay_requests_total{pipeline="p-rld-md",reason="kv-late"} 1.0' in text
        assert 'kvrelay_output_tokens_total{source="relay"}' in text
        assert "kvrelay_handoff_stall_seconds_count" in text
        assert 'kvrelay_link_bytes_total{peer="m0"}' in text
        assert common_pb2.SOURCE_MAIN
