"""A request's streams: what grpc.aio may do to them, and that none is left behind. The calls are scripted."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from kvrelay.errors import Overloaded, StageFailed
from kvrelay.proto.v1 import decode_pb2, prefill_pb2
from kvrelay.rpc.status import to_status
from kvrelay.telemetry.logging import bind_request_id, request_id
from services.router.legs import Ended, Event, FleetChanged, FromDecode, FromPrefill, Legs

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


class Stub:
    """Hands out scripted calls, in order; keeps what each was given to write."""

    def __init__(self, *calls: Call) -> None:
        self.calls = list(calls)
        self.opened: list[Any] = []

    def open(self, request: Any) -> Call:
        self.opened.append(request)
        return self.calls[len(self.opened) - 1]


def listened(room: Callable[[], asyncio.Event | None] = lambda: None) -> tuple[Legs, asyncio.Queue[Event]]:
    """Legs, and what they say."""
    legs, heard = Legs(), asyncio.Queue[Event]()

    def hear(event: Event) -> asyncio.Event | None:
        heard.put_nowait(event)
        return room()

    legs.listen(hear)
    return legs, heard


async def next_of(heard: asyncio.Queue[Event]) -> Event:
    async with asyncio.timeout(1):
        return await heard.get()


async def kinds_written(outbox: AsyncIterator[decode_pb2.DecodeRequest], count: int) -> list[str | None]:
    async with asyncio.timeout(1):
        return [(await anext(outbox)).WhichOneof("message") for _ in range(count)]


async def test_a_leg_whose_refusal_was_lost_is_asked_again_with_all_that_was_said() -> None:
    stub, (legs, heard) = Stub(Call([], LOST), Call([], LOST), Call([], full())), listened()
    number = legs.decode(stub.open, "m0", OPEN)
    legs.send(number, RESUME)
    event = await next_of(heard)
    assert isinstance(event, Ended) and isinstance(event.error, Overloaded)
    assert [call.cancelled for call in stub.calls] == [True, True, True]
    assert await kinds_written(stub.opened[2], 2) == ["open", "resume"]
    await legs.aclose()


async def test_a_leg_that_was_taken_in_is_not_asked_again() -> None:
    stub, (legs, heard) = Stub(Call([OPENED], LOST)), listened()
    legs.decode(stub.open, "m0", OPEN)
    assert isinstance(await next_of(heard), FromDecode)
    event = await next_of(heard)
    assert isinstance(event, Ended) and isinstance(event.error, StageFailed)
    assert "Core" not in str(event.error)
    assert len(stub.opened) == 1
    await legs.aclose()


async def test_a_leg_that_is_lost_again_and_again_is_given_up() -> None:
    stub, (legs, heard) = Stub(*(Call([], LOST) for _ in range(9))), listened()
    legs.decode(stub.open, "m0", OPEN)
    event = await next_of(heard)
    assert isinstance(event, Ended) and isinstance(event.error, StageFailed)
    assert 1 < len(stub.opened) < 9
    await legs.aclose()


@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_legs_that_are_closed_at_once_leave_no_call_behind(steps: int) -> None:
    stub, (legs, _) = Stub(Call([], None), Call([], None)), listened()
    legs.decode(stub.open, "m0", OPEN)
    legs.prefill(stub.open, "p0", prefill_pb2.PrefillRequest())
    for _ in range(steps):
        await asyncio.sleep(0)
    await legs.aclose()
    assert all(call.cancelled for call in stub.calls[: len(stub.opened)])
    assert len(legs) == 0


async def test_no_stream_is_read_on_before_there_is_room() -> None:
    room = asyncio.Event()
    stub = Stub(Call([OPENED, OPENED, OPENED], None))
    legs, heard = listened(lambda: None if room.is_set() else room)
    legs.decode(stub.open, "m0", OPEN)
    await next_of(heard)
    for _ in range(5):
        await asyncio.sleep(0)
    assert heard.empty()
    room.set()
    await next_of(heard)
    await next_of(heard)
    await legs.aclose()


async def test_a_leg_that_its_own_word_has_closed_says_nothing_more() -> None:
    stub, heard = Stub(Call([OPENED, OPENED], None)), list[Event]()
    legs = Legs()

    def hear(event: Event) -> None:
        heard.append(event)
        legs.close(1)

    legs.listen(hear)
    legs.decode(stub.open, "m0", OPEN)
    async with asyncio.timeout(1):
        while not stub.calls[0].cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert len(heard) == 1
    await legs.aclose()


async def test_a_prefill_stream_whose_status_was_lost_has_ended() -> None:
    stub, (legs, heard) = Stub(Call([prefill_pb2.PrefillEvent()], LOST)), listened()
    legs.prefill(stub.open, "p0", prefill_pb2.PrefillRequest())
    assert isinstance(await next_of(heard), FromPrefill)
    event = await next_of(heard)
    assert isinstance(event, Ended) and isinstance(event.error, StageFailed)
    await legs.aclose()


async def test_what_others_tell_is_heard_as_the_requests_own() -> None:
    bind_request_id("r1")
    heard: asyncio.Queue[tuple[Event, str]] = asyncio.Queue()
    legs = Legs()
    legs.listen(lambda event: heard.put_nowait((event, request_id.get())))
    bind_request_id("somebody else's")
    legs.tell(FleetChanged())
    assert heard.empty()
    async with asyncio.timeout(1):
        assert await heard.get() == (FleetChanged(), "r1")
    await legs.aclose()
