"""A request's streams: what grpc.aio may do to them, and that none is left behind. The calls are scripted."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from kvrelay.errors import Overloaded, StageFailed
from kvrelay.proto.v1 import decode_pb2, prefill_pb2
from kvrelay.rpc.status import to_status
from services.router.legs import Ended, FromDecode, Legs

OPEN = decode_pb2.OpenLeg(request_id="r")
RESUME = decode_pb2.DecodeRequest(resume=decode_pb2.Resume(first_index=0))
OPENED = decode_pb2.DecodeEvent(opened=decode_pb2.Opened())


def status(code: grpc.StatusCode, details: str, trailing: Any = ()) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details)


LOST = status(grpc.StatusCode.INTERNAL, "Internal error from Core")
"""What grpc.aio says of a stream that its server ended while it was written to."""


def full() -> grpc.aio.AioRpcError:
    refused = to_status(Overloaded("full"))
    return status(refused.code, refused.details, refused.trailing_metadata)


class Call:
    """One scripted call: says what it is told to, then fails or goes on for ever."""

    def __init__(self, says: list[Any], error: Exception | None) -> None:
        self.says, self.error = says, error
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[Any]:
        for event in self.says:
            yield event
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()

    def cancel(self) -> bool:
        self.cancelled = True
        return True


class Channel:
    """Hands out scripted calls, in order; keeps what each was given to write."""

    def __init__(self, *calls: Call) -> None:
        self.calls = list(calls)
        self.opened: list[Any] = []

    def stream_stream(self, *_: object, **__: object) -> Callable[..., Call]:
        return self._open

    unary_stream = stream_stream

    def _open(self, request: Any) -> Call:
        self.opened.append(request)
        return self.calls[len(self.opened) - 1]


async def kinds_written(outbox: AsyncIterator[decode_pb2.DecodeRequest], count: int) -> list[str | None]:
    async with asyncio.timeout(1):
        return [(await anext(outbox)).WhichOneof("message") for _ in range(count)]


async def test_a_leg_whose_refusal_was_lost_is_asked_again_with_all_that_was_said() -> None:
    channel, legs = Channel(Call([], LOST), Call([], LOST), Call([], full())), Legs()
    number = legs.decode(channel, "m0", OPEN)  # type: ignore[arg-type]
    legs.send(number, RESUME)
    event = await legs.next()
    assert isinstance(event, Ended) and isinstance(event.error, Overloaded)
    assert [call.cancelled for call in channel.calls] == [True, True, True]
    assert await kinds_written(channel.opened[2], 2) == ["open", "resume"]
    await legs.aclose()


async def test_a_leg_that_was_taken_in_is_not_asked_again() -> None:
    channel, legs = Channel(Call([OPENED], LOST)), Legs()
    legs.decode(channel, "m0", OPEN)  # type: ignore[arg-type]
    assert isinstance(await legs.next(), FromDecode)
    event = await legs.next()
    assert isinstance(event, Ended) and isinstance(event.error, StageFailed)
    assert "Core" not in str(event.error)
    assert len(channel.opened) == 1
    await legs.aclose()


async def test_a_leg_that_is_lost_again_and_again_is_given_up() -> None:
    channel, legs = Channel(*(Call([], LOST) for _ in range(9))), Legs()
    legs.decode(channel, "m0", OPEN)  # type: ignore[arg-type]
    event = await legs.next()
    assert isinstance(event, Ended) and isinstance(event.error, StageFailed)
    assert 1 < len(channel.opened) < 9
    await legs.aclose()


@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_legs_that_are_closed_at_once_leave_no_call_behind(steps: int) -> None:
    channel, legs = Channel(Call([], None), Call([], None)), Legs()
    legs.decode(channel, "m0", OPEN)  # type: ignore[arg-type]
    legs.prefill(channel, "p0", prefill_pb2.PrefillRequest())  # type: ignore[arg-type]
    for _ in range(steps):
        await asyncio.sleep(0)
    await legs.aclose()
    assert all(call.cancelled for call in channel.calls[: len(channel.opened)])
    assert len(legs) == 0
