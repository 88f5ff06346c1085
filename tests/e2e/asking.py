"""Requests that live long enough to be disturbed, and the answers that they must get all the same."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrelay.load.client import Answer, ask
from kvrelay.proto.v1 import common_pb2, router_pb2
from tests.e2e.conftest import Router

LIMIT_S = 30.0


def requests(salt: str, count: int = 4, tokens: int = 120, prompt: int = 600) -> list[router_pb2.GenerateRequest]:
    """Half of them relayed, half straight to main decode; no cache holds anything of them under a new salt."""
    pipelines = (router_pb2.PIPELINE_P_RLD_MD, router_pb2.PIPELINE_P_MD)
    return [
        router_pb2.GenerateRequest(
            token_ids=router_pb2.TokenIds(ids=[32 + (number * 7 + i * i) % 90 for i in range(prompt)]),
            sampling=common_pb2.Sampling(seed=number, max_tokens=tokens, ignore_eos=True),
            cache_salt=salt,
            pipeline=pipelines[number % 2],
        )
        for number in range(count)
    ]


@dataclass(frozen=True, slots=True)
class Flight:
    """Requests under way."""

    tasks: list[asyncio.Task[Answer]]
    grown: list[asyncio.Event]
    """One per request: it has got `tokens` tokens, or has ended."""

    async def grew(self) -> None:
        """Returns once every request has got the tokens that were waited for."""
        async with asyncio.timeout(LIMIT_S):
            for event in self.grown:
                await event.wait()

    async def answers(self) -> list[Answer]:
        """All of them, within LIMIT_S: nothing may hang."""
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*self.tasks)


@asynccontextmanager
async def under_way(
    router: Router, asked: Sequence[router_pb2.GenerateRequest], tokens: int = 1
) -> AsyncIterator[Flight]:
    """Sends them all at once; `grew` waits for `tokens` of each. Those left at the end of the block are cancelled."""
    async with asyncio.TaskGroup() as group:
        grown = [asyncio.Event() for _ in asked]
        tasks = [
            group.create_task(_one(router, request, tokens, event)) for request, event in zip(asked, grown, strict=True)
        ]
        try:
            yield Flight(tasks, grown)
        finally:
            for task in tasks:
                task.cancel()


async def _one(router: Router, request: router_pb2.GenerateRequest, tokens: int, grown: asyncio.Event) -> Answer:
    def seen(answer: Answer, reply: router_pb2.GenerateReply) -> None:
        if len(answer.ids) >= tokens:
            grown.set()

    try:
        return await ask(router.stub, request, timeout_s=LIMIT_S, on_reply=seen)
    finally:
        grown.set()


async def expected_ids(router: Router, asked: Sequence[router_pb2.GenerateRequest]) -> list[list[int]]:
    """What the undisturbed cluster answers, one request at a time."""
    answers = [await ask(router.stub, request, timeout_s=LIMIT_S) for request in asked]
    assert all(answer.ok for answer in answers), [answer.error for answer in answers]
    return [answer.ids for answer in answers]


CLEAR = ("UNAVAILABLE", "RESOURCE_EXHAUSTED")
"""How a request may end that lost a stage for which there is no other."""


def check(answers: Sequence[Answer], expected: Sequence[list[int]]) -> None:
    """Each is whole and equal, or ended with a clear status after a beginning that is equal."""
    for answer, ids in zip(answers, expected, strict=True):
        if answer.ok:
            assert answer.ids == ids
        else:
            assert answer.error.startswith(CLEAR), answer.error
            assert answer.ids == ids[: len(answer.ids)]
