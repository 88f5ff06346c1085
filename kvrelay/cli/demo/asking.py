"""Asks a router the demo's chats, all at once, turn by turn. Knows the router's service; compares nothing."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.cli.demo.chats import SYSTEM, Chat, Turn
from kvrelay.load.client import Answer, ask
from kvrelay.proto.v1 import router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel
from kvrelay.rpc.convert import handoff_mode_to_proto
from kvrelay.rpc.sampling import sampling_to_proto
from kvrelay.types import Sampling

TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One request of the demo, and what came of it."""

    chat: str
    turn: int
    """From 1."""
    prompt_ids: tuple[int, ...]
    """As the router tokenizes the chat so far."""
    sampling: Sampling
    answer: Answer


Observer = Callable[[Chat, int, Answer], None]
"""Called at each message of a stream, with the chat, the turn (from 1) and the answer so far."""


async def ask_all(address: str, chats: Sequence[Chat], observe: Observer) -> list[Asked]:
    """Every turn of every chat, in the order of chats and turns. A turn that fails ends its chat."""
    async with open_channel(address, Purpose.TOKENS) as channel:
        router = router_pb2_grpc.RouterServiceStub(channel)
        async with asyncio.TaskGroup() as users:
            talks = [users.create_task(_talk(router, chat, observe)) for chat in chats]
    return [asked for talk in talks for asked in talk.result()]


async def _talk(router: "router_pb2_grpc.RouterServiceAsyncStub", chat: Chat, observe: Observer) -> list[Asked]:
    said = router_pb2.Chat(messages=[router_pb2.ChatMessage(role="system", content=SYSTEM)])
    all_asked: list[Asked] = []
    for number, turn in enumerate(chat.turns, 1):
        said.messages.add(role="user", content=turn.says)
        asked = await _ask(router, chat, number, turn, said, observe)
        all_asked.append(asked)
        if not asked.answer.ok:
            break
        said.messages.add(role="assistant", content=asked.answer.text)
    return all_asked


async def _ask(
    router: "router_pb2_grpc.RouterServiceAsyncStub",
    chat: Chat,
    number: int,
    turn: Turn,
    said: router_pb2.Chat,
    observe: Observer,
) -> Asked:
    ids = await router.Tokenize(router_pb2.TokenizeRequest(chat=said), timeout=TIMEOUT_S)
    mode = handoff_mode_to_proto(turn.handoff)
    request = router_pb2.GenerateRequest(chat=said, sampling=sampling_to_proto(turn.sampling), handoff_mode=mode)
    answer = await ask(
        router, request, timeout_s=TIMEOUT_S, on_reply=lambda so_far, reply: observe(chat, number, so_far)
    )
    return Asked(chat.name, number, tuple(ids.ids), turn.sampling, answer)
