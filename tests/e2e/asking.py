"""Requests that live long enough to be disturbed, and the answers that they must get all the same."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import torch

from kvrelay.engine.reference import generate_reference
from kvrelay.load.client import Answer, ask
from kvrelay.model.weights import load_model
from kvrelay.proto.v1 import common_pb2, router_pb2
from kvrelay.types import Sampling
from tests.e2e.conftest import Router

LIMIT_S = 30.0
TOKENS = 120


def requests(salt: str, count: int = 4, tokens: int = TOKENS, prompt: int = 600) -> list[router_pb2.GenerateRequest]:
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


def reference_ids(asked: Sequence[router_pb2.GenerateRequest]) -> list[list[int]]:
    """What one engine answers, here in this process, to requests as made above. Takes a second: call it in a thread."""
    torch.set_num_threads(1)
    loaded = load_model("tiny", block_tokens=16)
    return [list(generate_reference(loaded, list(one.token_ids.ids), sampling_of(one)).ids) for one in asked]


def sampling_of(request: router_pb2.GenerateRequest) -> Sampling:
    wanted = request.sampling
    return Sampling(seed=wanted.seed, max_tokens=wanted.max_tokens, ignore_eos=wanted.ignore_eos)


async def whole(router: Router, asked: Sequence[router_pb2.GenerateRequest]) -> list[Answer]:
    """The answers to requests sent all at once, none of which may fail."""
    async with under_way(router, asked) as flight:
        answers = await flight.answers()
    assert [answer.error for answer in answers] == [""] * len(answers)
    return answers


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
