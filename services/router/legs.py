"""A request's child streams: opened here, and closed here whatever happens. Moves messages; decides nothing."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc

from kvrelay.errors import KvrelayError, StageFailed
from kvrelay.proto.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from kvrelay.rpc.status import from_rpc_error
from services.router.tasks import OwnedTasks

M = TypeVar("M", covariant=True)


class _Call(Protocol[M]):
    """The part of a gRPC call that is used here."""

    def __aiter__(self) -> AsyncIterator[M]: ...
    def cancel(self) -> bool: ...


_INBOX = 64
"""Messages of one request that wait for the router; beyond it gRPC's flow control slows the stages."""


@dataclass(frozen=True, slots=True)
class FromDecode:
    """A decode leg said something."""

    number: int
    event: decode_pb2.DecodeEvent


@dataclass(frozen=True, slots=True)
class FromPrefill:
    """A prefill stream said something."""

    number: int
    event: prefill_pb2.PrefillEvent


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream is over; `error`: not by its own will."""

    number: int
    error: KvrelayError | None


@dataclass(frozen=True, slots=True)
class RelayLate:
    """relay_ready_s are over for this leg."""

    leg: int


@dataclass(frozen=True, slots=True)
class WaitedLongEnough:
    """No stage has come back in time."""

    error: KvrelayError


@dataclass(frozen=True, slots=True)
class FleetChanged:
    """A stage joined or left."""


Event = FromDecode | FromPrefill | Ended | RelayLate | WaitedLongEnough | FleetChanged


class _Outbox(AsyncIterator[decode_pb2.DecodeRequest]):
    """What is to be written on a stream, in order; never blocks whoever fills it."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[decode_pb2.DecodeRequest | None] = asyncio.Queue()

    async def __anext__(self) -> decode_pb2.DecodeRequest:
        message = await self.messages.get()
        if message is None:
            raise StopAsyncIteration
        return message

    def end(self) -> None:
        """gRPC's writer of a call that is over would wait for ever."""
        self.messages.put_nowait(None)


class Legs:
    """The streams of one attempt, numbered in the order of opening. One reader takes `events()`."""

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[Event] = asyncio.Queue(_INBOX)
        self._numbers = itertools.count(1)
        self._tasks = OwnedTasks()
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._outboxes: dict[int, _Outbox] = {}
        self._at_close: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._streams)

    def decode(self, channel: grpc.aio.Channel, peer: str, first: decode_pb2.OpenLeg) -> int:
        """Opens a decode leg; -> its number. Waits for nothing: failures come as events."""
        number, outbox = next(self._numbers), _Outbox()
        self._outboxes[number] = outbox
        outbox.messages.put_nowait(decode_pb2.DecodeRequest(open=first))
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode(outbox)
        self._start(number, peer, call, lambda event: FromDecode(number, event), outbox.end)
        return number

    def prefill(self, channel: grpc.aio.Channel, peer: str, request: prefill_pb2.PrefillRequest) -> int:
        """Opens a prefill stream; -> its number."""
        number = next(self._numbers)
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request)
        self._start(number, peer, call, lambda event: FromPrefill(number, event), lambda: None)
        return number

    def send(self, number: int, message: decode_pb2.DecodeRequest) -> None:
        """Queues a message on a decode leg; to a closed one it is dropped."""
        outbox = self._outboxes.get(number)
        if outbox is not None:
            outbox.messages.put_nowait(message)

    def until_closed(self, undo: Callable[[], None]) -> None:
        """Calls `undo` when the legs are closed."""
        self._at_close.append(undo)

    def open(self, number: int) -> bool:
        """Whether the stream is still open."""
        return number in self._streams

    def close(self, number: int) -> None:
        """Closes one stream: its stage releases everything. No event of it comes from now on but those already read."""
        self._outboxes.pop(number, None)
        task = self._streams.pop(number, None)
        if task is not None:
            task.cancel()

    def close_after(self, number: int, seconds: float) -> None:
        """Closes a stream that has been told to end, if it has not done so by then."""

        async def late() -> None:
            await asyncio.sleep(seconds)
            self.close(number)

        self._tasks.start(late(), f"close {number}")

    def later(self, seconds: float, event: Event) -> None:
        """Delivers an event after a time."""

        async def deliver() -> None:
            await asyncio.sleep(seconds)
            await self._inbox.put(event)

        self._tasks.start(deliver(), f"later {event}")

    def tell(self, event: Event) -> None:
        """Delivers an event now."""
        self.later(0, event)

    async def next(self) -> Event:
        """The next event, in order of arrival."""
        return await self._inbox.get()

    async def aclose(self) -> None:
        """Closes every stream. Idempotent."""
        for undo in self._at_close:
            undo()
        self._at_close.clear()
        for number in list(self._streams):
            self.close(number)
        await self._tasks.aclose()

    def _start(
        self, number: int, peer: str, call: _Call[M], wrap: Callable[[M], Event], over: Callable[[], None]
    ) -> None:
        reading = self._read(number, peer, call, wrap, over)
        self._streams[number] = self._tasks.start(reading, f"stream {number} to {peer}")

    async def _read(
        self, number: int, peer: str, call: _Call[M], wrap: Callable[[M], Event], over: Callable[[], None]
    ) -> None:
        error: KvrelayError | None = None
        try:
            async for message in call:
                await self._inbox.put(wrap(message))
        except grpc.aio.AioRpcError as exc:
            error = from_rpc_error(exc, peer)
        except asyncio.CancelledError:
            if number in self._streams:  # not closed by us: the channel was
                error = StageFailed(f"{peer}: the connection was closed")
            else:
                raise
        finally:
            call.cancel()
            over()
        if number in self._streams:
            await self._inbox.put(Ended(number, error))
            self._streams.pop(number, None)
            self._outboxes.pop(number, None)
