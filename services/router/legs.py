"""A request's child streams: opened here, and closed here whatever happens. Moves messages; decides nothing."""

import asyncio
import contextvars
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc

from kvrelay.errors import KvrelayError, StageFailed
from kvrelay.proto.v1 import decode_pb2, prefill_pb2
from kvrelay.rpc.status import broke_while_writing, from_rpc_error
from kvrelay.types import Role
from services.router.tasks import Bell, OwnedTasks

log = logging.getLogger(__name__)

M = TypeVar("M", covariant=True)


class Call(Protocol[M]):
    """The part of a gRPC call that is used here."""

    def __aiter__(self) -> AsyncIterator[M]: ...
    def cancel(self) -> bool: ...


OpenDecode = Callable[[AsyncIterator[decode_pb2.DecodeRequest]], Call[decode_pb2.DecodeEvent]]
"""A stub's Decode."""
OpenPrefill = Callable[[prefill_pb2.PrefillRequest], Call[prefill_pb2.PrefillEvent]]
"""A stub's Prefill."""


@dataclass(slots=True)
class FromDecode:
    """A decode leg said something."""

    number: int
    event: decode_pb2.DecodeEvent


@dataclass(slots=True)
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
class TurnDue:
    """turn_wait_s are over for this relay leg."""

    leg: int


@dataclass(frozen=True, slots=True)
class WaitedLongEnough:
    """No stage has come back in time."""

    error: KvrelayError


@dataclass(frozen=True, slots=True)
class FeedDue:
    """The stages of this role were full a while ago: time to ask again."""

    role: Role
    why: str
    whole_answer: bool


@dataclass(frozen=True, slots=True)
class FleetChanged:
    """A stage joined or left."""


Event = FromDecode | FromPrefill | Ended | RelayLate | TurnDue | WaitedLongEnough | FeedDue | FleetChanged


_REOPENINGS = 4
"""Times that a stream is opened again whose status was lost; each is lost again in a few per cent at most."""


class _Outbox(AsyncIterator[decode_pb2.DecodeRequest]):
    """What is to be written on a stream, in order; never blocks whoever fills it."""

    def __init__(self, messages: Iterable[decode_pb2.DecodeRequest]) -> None:
        self._messages: deque[decode_pb2.DecodeRequest] = deque(messages)
        self._again: list[decode_pb2.DecodeRequest] | None = [*self._messages]
        self._bell = Bell()
        self._ended = False

    async def __anext__(self) -> decode_pb2.DecodeRequest:
        try:
            while not self._messages:
                if self._ended:
                    raise StopAsyncIteration
                await self._bell.rung()
        except asyncio.CancelledError:
            # By grpc.aio, whose call is over; it would format a traceback of this, for nobody, at each closed leg.
            raise StopAsyncIteration from None
        return self._messages.popleft()

    def put(self, message: decode_pb2.DecodeRequest) -> None:
        """Queues a message."""
        if self._again is not None:
            self._again.append(message)
        self._messages.append(message)
        self._bell.ring()

    def heard(self) -> None:
        """The stage has taken the leg in: it will not be opened again."""
        self._again = None

    def reopened(self) -> "_Outbox | None":
        """The same messages for another stream; None once the stage has been heard."""
        return None if self._again is None else _Outbox(self._again)

    def end(self) -> None:
        """gRPC's writer of a call that is over would wait for ever."""
        self._ended = True
        self._bell.ring()


Hear = Callable[[Event], asyncio.Event | None]
"""Takes an event. What it returns, if anything, is waited for before the stream is read on: that slows its stage."""


def _deaf(event: Event) -> None:
    raise AssertionError(f"nobody listens to {event}")


def _unheard(event: Event) -> None:
    """Nothing is heard after the end."""


class Legs:
    """The streams of one attempt, numbered in the order of opening. One listener hears all of them, event by event."""

    def __init__(self, opened: set["Legs"] | None = None) -> None:
        """It is in `opened` until it is closed."""
        self._opened = set() if opened is None else opened
        self._opened.add(self)
        self._hear: Hear = _deaf
        self._context = contextvars.copy_context()
        self._numbers = itertools.count(1)
        self._tasks = OwnedTasks()
        self._timers: list[asyncio.Handle] = []
        self._streams: dict[int, asyncio.Task[None]] = {}
        self._outboxes: dict[int, _Outbox] = {}
        self._at_close: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._streams)

    def listen(self, hear: Hear) -> None:
        """`hear` gets every event, in order of arrival; it must not raise."""
        self._hear = hear

    def decode(self, opening: OpenDecode, peer: str, first: decode_pb2.OpenLeg) -> int:
        """Opens a decode leg; -> its number. Waits for nothing: failures come as events."""
        number = next(self._numbers)
        self._outboxes[number] = _Outbox([decode_pb2.DecodeRequest(open=first)])
        self._streams[number] = self._tasks.start(self._keep_decode(number, peer, opening), f"leg {number} at {peer}")
        return number

    def prefill(self, opening: OpenPrefill, peer: str, request: prefill_pb2.PrefillRequest) -> int:
        """Opens a prefill stream, now: nothing that is opened after it leaves before it. -> its number."""
        number = next(self._numbers)
        call = opening(request)
        task = self._tasks.start(self._keep_prefill(number, peer, call), f"prefill {number} at {peer}")
        task.add_done_callback(lambda _: call.cancel())  # a task may be cancelled before its first step
        self._streams[number] = task
        return number

    def send(self, number: int, message: decode_pb2.DecodeRequest) -> None:
        """Queues a message on a decode leg; to a closed one it is dropped."""
        outbox = self._outboxes.get(number)
        if outbox is not None:
            outbox.put(message)

    def until_closed(self, undo: Callable[[], None]) -> None:
        """Calls `undo` when the legs are closed."""
        self._at_close.append(undo)

    def open(self, number: int) -> bool:
        """Whether the stream is still open."""
        return number in self._streams

    def close(self, number: int) -> None:
        """Closes one stream: its stage releases everything. No event of it comes from now on."""
        self._outboxes.pop(number, None)
        task = self._streams.pop(number, None)
        if task is not None:
            task.cancel()

    def close_all(self) -> None:
        """Closes every stream that is open."""
        for number in list(self._streams):
            self.close(number)

    def close_after(self, number: int, seconds: float) -> None:
        """Closes a stream that has been told to end, if it has not done so by then."""
        self._timers.append(asyncio.get_running_loop().call_later(seconds, self.close, number))

    def later(self, seconds: float, event: Event) -> None:
        """Delivers an event after a time."""
        self._timers.append(asyncio.get_running_loop().call_later(seconds, self._hear, event))

    def tell(self, event: Event) -> None:
        """Delivers an event in the next tick, as the request's own: its log lines have the request's id."""
        self._timers.append(asyncio.get_running_loop().call_soon(self._hear, event, context=self._context))

    async def aclose(self) -> None:
        """Closes every stream. Idempotent."""
        for undo in self._at_close:
            undo()
        self._at_close.clear()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.close_all()
        await self._tasks.aclose()
        self._opened.discard(self)
        self._hear = _unheard  # who listened knows the legs: both, and the prompt, would stay until the next collection

    async def _keep_prefill(self, number: int, peer: str, call: Call[prefill_pb2.PrefillEvent]) -> None:
        self._over(number, await self._read(number, peer, call, FromPrefill))

    # Opened inside its task: one that is cancelled before its first step leaves no call behind.

    async def _keep_decode(self, number: int, peer: str, opening: OpenDecode) -> None:
        """One leg's stream; another one in its place if its status was lost before the stage had said anything.

        A stage that refuses a leg ends its stream; if a Resume is being written just then, grpc.aio loses the status,
        and with it the reason: full, restarted, draining. Nothing was taken in, so asking again is harmless.
        """
        for reopenings in itertools.count():
            outbox = self._outboxes[number]
            try:
                return self._over(number, await self._read(number, peer, opening(outbox), FromDecode, outbox))
            except grpc.aio.AioRpcError as error:
                again = outbox.reopened() if reopenings < _REOPENINGS else None
                if again is None or number not in self._streams:
                    return self._over(number, from_rpc_error(error, peer))
                self._outboxes[number] = again
                log.info("%s ended its stream while it was written to: asking again", peer)
            finally:
                outbox.end()

    async def _read(
        self, number: int, peer: str, call: Call[M], wrap: Callable[[int, M], Event], outbox: _Outbox | None = None
    ) -> KvrelayError | None:
        """Passes messages on; -> why the stream is over, None if by its own will. Raises only a lost status."""
        new = True
        try:
            async for message in call:
                if number not in self._streams:  # closed by what it said before
                    break
                if new and outbox is not None:
                    outbox.heard()
                new = False
                if (full := self._hear(wrap(number, message))) is not None:
                    await full.wait()
        except grpc.aio.AioRpcError as error:
            if outbox is not None and broke_while_writing(error):
                raise
            return from_rpc_error(error, peer)
        except asyncio.CancelledError:
            if number in self._streams:  # not closed by us: the channel was
                return StageFailed(f"{peer}: the connection was closed")
            raise
        finally:
            call.cancel()
        return None

    def _over(self, number: int, error: KvrelayError | None) -> None:
        self._outboxes.pop(number, None)
        if self._streams.pop(number, None) is not None:
            self._hear(Ended(number, error))
