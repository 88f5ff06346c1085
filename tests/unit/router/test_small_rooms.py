"""Admission, the drain group, the client's stream, registration, owned tasks."""

import asyncio

import pytest

from kvrelay.errors import Overloaded
from kvrelay.proto.v1 import router_pb2
from kvrelay.types import Role, Sampling, Source, TokenRun
from services.router.admission import Admission
from services.router.answer import Answer
from services.router.client import ClientStream
from services.router.drain import DrainGroup, must_cut
from services.router.registration import TokenizerFacts, refusal
from services.router.tasks import OwnedTasks
from tests.fakes_stages import LAYOUT, described


async def test_admission_queues_first_come_and_refuses_beyond_with_a_hint() -> None:
    refused: list[int] = []
    admission = Admission(1, 1, 2.5, lambda: refused.append(1))
    release = asyncio.Event()
    order: list[str] = []

    async def hold(name: str) -> None:
        async with admission:
            order.append(name)
            await release.wait()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(hold("first"))
        await asyncio.sleep(0)
        tasks.create_task(hold("second"))
        await asyncio.sleep(0)
        assert (admission.in_flight, admission.queued) == (1, 1)
        with pytest.raises(Overloaded) as caught:
            async with admission:
                pass
        assert caught.value.retry_after_s == 2.5
        assert refused == [1]
        release.set()
    assert order == ["first", "second"]
    assert (admission.in_flight, admission.queued) == (0, 0)


async def test_a_cancelled_waiter_leaves_the_queue() -> None:
    admission = Admission(1, 1, 1.0, lambda: None)
    async with admission:
        waiter = asyncio.ensure_future(admission.__aenter__())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert admission.queued == 0
    async with admission:
        assert admission.in_flight == 1


class Endless:
    """A drain that nobody ends."""

    closed = False

    async def drain(self) -> str:
        await asyncio.Event().wait()
        return "never"

    async def aclose(self) -> None:
        self.closed = True


async def test_the_drain_group_is_bounded_and_closes_what_it_adopted() -> None:
    outcomes: list[str] = []
    group = DrainGroup(1, 0.05, outcomes.append)
    first, second = Endless(), Endless()
    assert group.adopt(first)
    assert not group.adopt(second)
    async with asyncio.timeout(2):
        while len(group):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert first.closed
    assert not second.closed
    assert outcomes == ["full", "deadline"]
    assert group.adopt(second)
    await group.aclose()
    assert second.closed


@pytest.mark.parametrize(
    ("remaining", "goodput", "cut"), [(100, 100.0, False), (101, 100.0, True), (0, 0.0, False), (5, 0.0, True)]
)
def test_a_push_is_cut_when_its_rest_needs_too_much_of_the_link(remaining: int, goodput: float, cut: bool) -> None:
    assert must_cut(remaining, goodput, 1.0) is cut


async def test_tokens_coalesce_while_the_client_is_slow_and_room_is_bounded() -> None:
    answer = Answer(Sampling(seed=0, max_tokens=100), [], None)
    written: list[router_pb2.GenerateReply] = []
    gate = asyncio.Event()

    async def write(reply: router_pb2.GenerateReply) -> None:
        await gate.wait()
        written.append(reply)

    client = ClientStream(write, answer, 3)
    client.shown = True
    written_before: list[int] = []
    client.start(router_pb2.Started, lambda: written_before.append(len(written)))
    async with asyncio.TaskGroup() as tasks:
        writing = tasks.create_task(client.flush())
        await asyncio.sleep(0)
        for index in range(5):
            assert index > 3 or client.full is None
            answer.take(TokenRun(index, (index,)), Source.RELAY)
            client.wake()
        room = client.full
        assert room is not None
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await room.wait()
        gate.set()
        await writing
        assert client.full is None
        await client.complete(router_pb2.Completed())
    assert [reply.WhichOneof("reply") for reply in written] == ["started", "output", "completed"]
    assert list(written[1].output.tokens.ids) == [0, 1, 2, 3, 4]
    assert written_before == [2]  # what the client need not wait for comes once, and after what was there for it


async def test_nothing_is_written_before_it_may_be_shown() -> None:
    answer = Answer(Sampling(seed=0, max_tokens=1), [], None)
    written: list[router_pb2.GenerateReply] = []

    async def write(reply: router_pb2.GenerateReply) -> None:
        written.append(reply)

    client = ClientStream(write, answer, 3)
    answer.take(TokenRun(0, (1,)), Source.PREFILL)
    client.wake()
    await client.flush()
    assert written == []
    client.shown = True
    await client.complete(router_pb2.Completed())
    assert len(written) == 2


GOOD = described(Role.MAIN, "m0")
FACTS = TokenizerFacts(GOOD.tokenizer, GOOD.vocab_size)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokenizer": "other"}, "tokenizer: .* other at p0"),
        ({"vocab_size": 10}, "vocab_size: 26. at the router, 10 at p0"),
        ({"vocab_size": 1000}, "vocab_size: 26. at m0, 1000 at p0"),
        ({"eos_token_ids": (3,)}, r"eos_token_ids: \(257,\) at m0, \(3,\) at p0"),
        (
            {"layout": LAYOUT.__class__("w", 2, 2, 8, 32, "float64", "default")},
            "layout.block_tokens: 16 here, 32 there.*m0.*p0",
        ),
        ({"instance_id": "m0"}, "instance_id: m0 is at"),
    ],
)
def test_a_stage_that_disagrees_is_refused_with_both_values(changes: dict[str, object], text: str) -> None:
    import re

    stage = described(Role.PREFILL, "p0") if "instance_id" not in changes else described(Role.PREFILL, "m0")
    if "instance_id" not in changes:
        stage = described(Role.PREFILL, "p0", **changes)
    found = refusal(stage, FACTS, [GOOD])
    assert found is not None
    assert re.search(text, found)


def test_a_stage_that_agrees_is_admitted() -> None:
    assert refusal(described(Role.PREFILL, "p0"), FACTS, [GOOD]) is None


async def test_owned_tasks_end_with_their_owner() -> None:
    tasks = OwnedTasks()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("yes")

    tasks.start(work(), "work")
    await asyncio.sleep(0)
    await tasks.aclose()
    assert ended == ["yes"]
    assert len(tasks) == 0
