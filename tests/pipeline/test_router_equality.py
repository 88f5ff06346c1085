"""Whatever the route, the hits, the hand-off and the stop condition: the tokens are those of one engine."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from kvrelay.engine.reference import generate_reference
from kvrelay.model.weights import LoadedModel, load_model
from kvrelay.proto.v1 import common_pb2, router_pb2
from kvrelay.rpc.convert import finish_reason_to_proto, sampling_to_proto
from kvrelay.text.stream import TextStream
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.types import Sampling
from tests.pipeline.topology import Got, InThread, ask

P_RLD_MD, P_MD = router_pb2.PIPELINE_P_RLD_MD, router_pb2.PIPELINE_P_MD
P_RLD, MD = router_pb2.PIPELINE_P_RLD, router_pb2.PIPELINE_MD
MODES = [router_pb2.HANDOFF_MODE_ONE_SHOT, router_pb2.HANDOFF_MODE_CATCH_UP, router_pb2.HANDOFF_MODE_DYNAMIC]
TOKENIZER = load_tokenizer("tiny")
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65]


@dataclass(frozen=True)
class Expected:
    """What one engine and one TextStream give."""

    ids: list[int]
    text: str
    reason: common_pb2.FinishReason
    stop: str


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("tiny", device="cpu", dtype="", block_tokens=16)


@pytest.fixture(scope="module")
def running() -> Iterator[InThread]:
    # Slow enough that a relay has something to say before its KV has crossed, and small thresholds for every mode.
    wan = {"rate": "400KB", "delay_ms": 4.0}
    router = {"handoff_tokens": 2, "catch_up_tokens": 4, "handoff_rounds": 2}
    with InThread(wan=wan, router=router) as topology:
        yield topology


def expected(loaded: LoadedModel, prompt: list[int], sampling: Sampling, stop: tuple[str, ...] = ()) -> Expected:
    alone = generate_reference(loaded, prompt, sampling, max_model_tokens=4096, with_margins=False)
    text = TextStream(TOKENIZER, stop, sampling.stop_token_ids)
    delta = text.push(alone.ids)
    if delta.stop is not None:
        reason = common_pb2.FINISH_REASON_STOP_STRING
        return Expected(list(alone.ids[: delta.tokens]), delta.text, reason, delta.stop)
    return Expected(list(alone.ids), delta.text + text.finish(), finish_reason_to_proto(alone.reason), "")


def request(
    prompt: list[int],
    sampling: Sampling,
    stop: tuple[str, ...] = (),
    pipeline: router_pb2.Pipeline = router_pb2.PIPELINE_UNSPECIFIED,
    mode: router_pb2.HandoffMode = router_pb2.HANDOFF_MODE_UNSPECIFIED,
) -> router_pb2.GenerateRequest:
    asked = ask(prompt, pipeline=pipeline, mode=mode, stop=stop)
    asked.sampling.CopyFrom(sampling_to_proto(sampling))
    return asked


def check(got: Got, wanted: Expected) -> None:
    assert got.ids == wanted.ids
    assert got.text == wanted.text
    assert got.completed.reason == wanted.reason
    assert got.completed.stop_string == wanted.stop


async def warm(running: InThread, prompt: list[int], prefill: int, relay: int, main: int) -> None:
    """Leaves exactly so many leading tokens of the prompt in each stage's cache (rounded down to blocks)."""
    topology = running.topology
    await topology.flush()
    if relay:
        await topology.generate(ask(prompt[:relay], max_tokens=1, pipeline=P_RLD))
        await topology.generate(ask(prompt[:relay], max_tokens=2, pipeline=P_RLD))
        await topology.flush(*topology.prefill)
    if prefill:
        await topology.generate(ask(prompt[:prefill], max_tokens=1, pipeline=P_MD))
        await topology.settled()
        await topology.flush(*topology.main)
    if main:
        await topology.generate(ask(prompt[:main], max_tokens=1, pipeline=MD))


samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.integers(1, 40),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logprobs=st.sampled_from([None, 0, 3]),
)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_tokens_equal_one_engine(running: InThread, loaded: LoadedModel, data: st.DataObject) -> None:
    length = data.draw(st.one_of(st.sampled_from(EDGES), st.integers(1, 130)), label="prompt tokens")
    prompt = random.Random(data.draw(st.integers(0, 2**16), label="prompt")).choices(range(256), k=length)
    hits = [data.draw(st.integers(0, length), label=f"hit at {role}") for role in ("prefill", "relay", "main")]
    sampling = data.draw(samplings)
    pipeline = data.draw(st.sampled_from([P_RLD_MD, P_RLD_MD, P_RLD_MD, P_MD, P_RLD, MD]))
    mode = data.draw(st.sampled_from(MODES))
    plain = expected(loaded, prompt, sampling)
    stop: tuple[str, ...] = ()
    if data.draw(st.booleans(), label="stop") and plain.ids:
        at = data.draw(st.integers(0, len(plain.ids) - 1), label="stop at")
        if data.draw(st.booleans(), label="stop string") and plain.text:
            begin = data.draw(st.integers(0, len(plain.text) - 1))
            stop = (plain.text[begin : begin + data.draw(st.integers(1, 3))],)
        else:
            sampling = replace(sampling, stop_token_ids=(plain.ids[at],))

    async def one() -> Got:
        await warm(running, prompt, *hits)
        got = await running.topology.generate(request(prompt, sampling, stop, pipeline, mode))
        await running.topology.settled()
        return got

    got = running.run(one())
    event(f"{router_pb2.Pipeline.Name(got.report.pipeline)} {router_pb2.HandoffMode.Name(got.report.handoff_mode)}")
    check(got, expected(loaded, prompt, sampling, stop))
    usage = got.completed.usage
    if pipeline != MD:
        assert usage.cached_prefill_tokens == min(hits[0], length - 1) // 16 * 16
    if usage.main_tokens:  # else the answer may be complete before main decode has said what it holds
        most = length - 1 if pipeline == MD else length
        assert usage.cached_main_tokens == min(hits[2], most) // 16 * 16


@pytest.mark.parametrize(("pipeline", "mode"), [(P_RLD_MD, MODES[0]), (P_RLD_MD, MODES[1]), (P_MD, MODES[0])])
def test_stop_conditions_at_every_index(
    running: InThread, loaded: LoadedModel, pipeline: router_pb2.Pipeline, mode: router_pb2.HandoffMode
) -> None:
    prompt = random.Random(5).choices(range(256), k=40)
    base = Sampling(seed=3, max_tokens=12, temperature=1.0)
    plain = expected(loaded, prompt, base)

    async def all_of_them() -> None:
        for index in range(len(plain.ids)):
            cases = [
                (replace(base, max_tokens=index + 1), ()),
                (replace(base, stop_token_ids=(plain.ids[index],)), ()),
            ]
            if index < len(plain.text):
                cases.append((base, (plain.text[index : index + 2],)))
            await running.topology.flush()
            for sampling, stop in cases:
                got = await running.topology.generate(request(prompt, sampling, stop, pipeline, mode))
                check(got, expected(loaded, prompt, sampling, stop))

    running.run(all_of_them())
    running.run(running.topology.settled())


@pytest.mark.parametrize("pipeline", [P_RLD_MD, P_MD, P_RLD, MD])
def test_eos_ends_the_answer_wherever_it_is_drawn(
    running: InThread, loaded: LoadedModel, pipeline: router_pb2.Pipeline
) -> None:
    prompt = random.Random(6).choices(range(256), k=50)
    found = []
    for seed in range(60):
        sampling = Sampling(seed=seed, max_tokens=30, temperature=5.0)
        wanted = expected(loaded, prompt, sampling)
        if wanted.reason == common_pb2.FINISH_REASON_EOS:
            found.append((sampling, wanted))
    assert found, "the tiny model never ends an answer"

    async def all_of_them() -> None:
        for sampling, wanted in found[:3]:
            await running.topology.flush()
            check(await running.topology.generate(request(prompt, sampling, (), pipeline)), wanted)
            ignoring = replace(sampling, ignore_eos=True)
            got = await running.topology.generate(request(prompt, ignoring, (), pipeline))
            check(got, expected(loaded, prompt, ignoring))

    running.run(all_of_them())
    running.run(running.topology.settled())


def test_logprobs_are_the_same_whoever_drew_the_token(running: InThread, loaded: LoadedModel) -> None:
    """Every penalty and filter at once: none may see other ids, or count others, behind a hand-off."""
    prompt = random.Random(8).choices(range(256), k=70)
    everything = Sampling(
        seed=9,
        max_tokens=40,
        temperature=1.5,
        top_k=60,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        min_tokens=20,
        logprobs=5,
    )
    wanted = expected(loaded, prompt, everything)

    async def of(pipeline: router_pb2.Pipeline, mode: router_pb2.HandoffMode) -> list[common_pb2.Logprobs]:
        await running.topology.flush()
        got = await running.topology.generate(request(prompt, everything, (), pipeline, mode))
        check(got, wanted)
        return [one for output in got.outputs for one in output.tokens.logprobs]

    alone = running.run(of(MD, MODES[0]))
    assert len(alone) == len(wanted.ids)
    for pipeline, mode in [(P_RLD_MD, MODES[0]), (P_RLD_MD, MODES[1]), (P_MD, MODES[0]), (P_RLD, MODES[0])]:
        for here, there in zip(alone, running.run(of(pipeline, mode)), strict=True):
            assert here.chosen == pytest.approx(there.chosen, abs=1e-9)
            assert [one.token_id for one in here.top] == [one.token_id for one in there.top]
    running.run(running.topology.settled())


def test_requests_of_all_kinds_at_once_do_not_mix(running: InThread, loaded: LoadedModel) -> None:
    draw = random.Random(7)
    shared = draw.choices(range(256), k=48)
    asked = []
    for index in range(12):
        prompt = [*shared, *draw.choices(range(256), k=draw.randint(1, 40))]
        sampling = Sampling(seed=index, max_tokens=draw.randint(1, 40), temperature=draw.choice([0.0, 1.0]))
        pipeline = draw.choice([P_RLD_MD, P_RLD_MD, P_MD, P_RLD, MD])
        asked.append((prompt, sampling, pipeline, draw.choice(MODES)))

    async def all_of_them() -> list[Got]:
        await running.topology.flush()
        return await asyncio.gather(
            *(running.topology.generate(request(p, s, (), pipeline, mode)) for p, s, pipeline, mode in asked)
        )

    for got, (prompt, sampling, _, _) in zip(running.run(all_of_them()), asked, strict=True):
        check(got, expected(loaded, prompt, sampling))
    running.run(running.topology.settled())
