"""The client sees every way in which a stream can break its contract."""

from collections.abc import AsyncIterator

import grpc
import pytest

from kvrelay.load.arrival import ClosedLoop
from kvrelay.load.client import Answer, ask
from kvrelay.load.hits import HitRates, SharedPrefixes
from kvrelay.load.lengths import Lengths
from kvrelay.load.run import LoadOptions, LoadRun
from kvrelay.load.target import RouterTarget
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc

Reply = router_pb2.GenerateReply


def started() -> Reply:
    return Reply(started=router_pb2.Started(request_id="r1", seed=3, prompt_tokens=5))


def output(first: int, ids: list[int], source: common_pb2.Source, text: str = "") -> Reply:
    chunk = common_pb2.TokenChunk(first_index=first, ids=ids, source=source)
    return Reply(output=router_pb2.Output(tokens=chunk, text=text))


def completed(prefill: int, relay: int, main: int, text: str = "") -> Reply:
    usage = router_pb2.Usage(
        prompt_tokens=5,
        completion_tokens=prefill + relay + main,
        prefill_tokens=prefill,
        relay_tokens=relay,
        main_tokens=main,
    )
    report = router_pb2.RequestReport(pipeline=router_pb2.PIPELINE_P_RLD_MD, handoff_stall_ms=4.0)
    return Reply(completed=router_pb2.Completed(usage=usage, report=report, text=text))


WHOLE = [
    started(),
    output(0, [7], common_pb2.SOURCE_PREFILL, "a"),
    output(1, [8, 9], common_pb2.SOURCE_RELAY, "b"),
    output(3, [10], common_pb2.SOURCE_MAIN),
    completed(1, 2, 1, "c"),
]


class FakeRouter(router_pb2_grpc.RouterServiceServicer):
    """Answers each Generate with the given replies, and then with the given status."""

    def __init__(self, replies: list[Reply], code: grpc.StatusCode = grpc.StatusCode.OK) -> None:
        self.replies = replies
        self.code = code
        self.asked: list[router_pb2.GenerateRequest] = []

    async def Generate(  # type: ignore[override]
        self, request: router_pb2.GenerateRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> AsyncIterator[Reply]:
        self.asked.append(request)
        for reply in self.replies:
            yield reply
        if self.code is not grpc.StatusCode.OK:
            await context.abort(self.code, "no main stage")


async def asked(router: FakeRouter) -> Answer:
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = router_pb2_grpc.RouterServiceStub(channel)
            return await ask(stub, router_pb2.GenerateRequest(), timeout_s=5)
    finally:
        await server.stop(None)


async def test_a_whole_answer_is_taken_apart_by_stage_and_time() -> None:
    answer = await asked(FakeRouter(WHOLE))
    assert answer.ok
    assert answer.ids == [7, 8, 9, 10]
    assert answer.text == "abc"
    assert [answer.count(source) for source in ("prefill", "relay", "main")] == [1, 2, 1]
    assert answer.ttft_ms is not None and answer.ttst_ms is not None
    assert answer.ttft_ms <= answer.ttst_ms <= answer.e2el_ms
    assert len(answer.itl_ms) == 3 and answer.tpot_ms is not None


@pytest.mark.parametrize(
    ("replies", "complaint"),
    [
        ([], "cut"),
        (WHOLE[:3], "cut"),
        ([WHOLE[0], WHOLE[1], WHOLE[3], WHOLE[4]], "token index 3 came, 1 was due"),
        ([WHOLE[0], WHOLE[1], WHOLE[1], WHOLE[4]], "token index 0 came, 1 was due"),
        ([*WHOLE[:4], completed(1, 1, 2)], "usage says"),
        ([*WHOLE[:4], completed(1, 2, 0)], "usage says"),
    ],
)
async def test_a_broken_stream_is_never_success(replies: list[Reply], complaint: str) -> None:
    answer = await asked(FakeRouter(replies))
    assert not answer.ok
    assert complaint in answer.error


async def test_a_status_is_the_error_even_after_tokens() -> None:
    answer = await asked(FakeRouter(WHOLE[:3], grpc.StatusCode.UNAVAILABLE))
    assert answer.error == "UNAVAILABLE: no main stage"
    assert answer.ids == [7, 8, 9]


async def test_a_later_turn_carries_the_answers_before_it() -> None:
    router = FakeRouter(WHOLE)
    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(router, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ones = SharedPrefixes(
        seed=1,
        vocab_size=256,
        count=1,
        hits=HitRates.parse("0.5"),
        prompt_tokens=Lengths(20, 20),
        output_tokens=Lengths(4, 4),
        turns=2,
    )
    try:
        options = LoadOptions(RouterTarget(f"127.0.0.1:{port}"), ones, ClosedLoop(1), timeout_s=5)
        async with options.target.open() as target:
            run = LoadRun(options, target)
            assert await run.warm_up() == []
            await run.measure()
    finally:
        await server.stop(None)
    first, second = (list(request.token_ids.ids) for request in router.asked[-2:])
    conversation = next(ones.conversations())
    assert second == [*first, 7, 8, 9, 10, *conversation.turns[1].fresh_ids]
    assert [record.ok for record in run.records] == [True, True]
    assert run.records[0].pipeline == "p-rld-md"
    assert run.records[0].handoff_stall_ms == 4.0
    assert router.asked[-1].sampling.max_tokens == 4
