"""Stages that say only what a test tells them to, behind real gRPC: every order of events can be forced."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from kvrelay.errors import KvrelayError
from kvrelay.proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    stage_pb2,
    stage_pb2_grpc,
)
from kvrelay.rpc.convert import (
    description_to_proto,
    finish_reason_to_proto,
    load_to_proto,
    token_run_to_proto,
)
from kvrelay.rpc.server import grpc_server
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.types import (
    FinishReason,
    LayoutFingerprint,
    Role,
    Source,
    StageDescription,
    StageLoad,
    TokenRun,
)

WAIT_S = 5.0
LAYOUT = LayoutFingerprint("w", 2, 2, 8, 16, "float64", "default")
SOURCES = {Role.PREFILL: Source.PREFILL, Role.RELAY: Source.RELAY, Role.MAIN: Source.MAIN}
PUSH_OUTCOMES = {
    "committed": prefill_pb2.PushEnded.OUTCOME_COMMITTED,
    "ended": prefill_pb2.PushEnded.OUTCOME_ENDED,
    "failed": prefill_pb2.PushEnded.OUTCOME_FAILED,
}


def described(role: Role, instance_id: str, **changes: Any) -> StageDescription:
    """A stage that agrees with the tiny tokenizer."""
    tokenizer = load_tokenizer("tiny")
    description = StageDescription(
        instance_id=instance_id,
        epoch=1,
        role=role,
        site="b" if role is Role.MAIN else "a",
        address="",
        model="tiny",
        tokenizer=tokenizer.identity,
        layout=LAYOUT,
        vocab_size=tokenizer.vocab_size,
        max_model_tokens=4096,
        pool_blocks=1024,
        max_running=8,
        eos_token_ids=(257,),
    )
    return replace(description, **changes)


class _Stream:
    """The test's end of one call. What is sent goes out in order; the call ends with `end` or `fail`."""

    def __init__(self) -> None:
        self._out: asyncio.Queue[Any] = asyncio.Queue()
        self.closed = asyncio.Event()
        """The router has closed the call, or it has ended."""

    def put(self, event: Any) -> None:
        self._out.put_nowait(event)

    def end(self) -> None:
        """Ends the call OK."""
        self._out.put_nowait(None)

    def fail(self, error: KvrelayError) -> None:
        """Ends the call with an error."""
        self._out.put_nowait(error)

    async def gone(self) -> None:
        """Returns once the call is over."""
        async with asyncio.timeout(WAIT_S):
            await self.closed.wait()

    async def write_out(self, context: Any) -> None:
        try:
            while (event := await self._out.get()) is not None:
                if isinstance(event, KvrelayError):
                    raise event
                await context.write(event)
        finally:
            self.closed.set()


class FakeLeg(_Stream):
    """One Decode call."""

    def __init__(self, opening: decode_pb2.OpenLeg, role: Role) -> None:
        super().__init__()
        self.opening = opening
        self._role = role
        self._in: asyncio.Queue[decode_pb2.DecodeRequest] = asyncio.Queue()

    async def hears(self, kind: str) -> Any:
        """The next message, which must be of this kind."""
        async with asyncio.timeout(WAIT_S):
            message = await self._in.get()
        assert message.WhichOneof("message") == kind, f"{message} where {kind} was expected"
        return getattr(message, kind)

    @property
    def unheard(self) -> int:
        """Messages that have come and were not looked at."""
        return self._in.qsize()

    def opened(self, cached_tokens: int = 0) -> None:
        self.put(decode_pb2.DecodeEvent(opened=decode_pb2.Opened(cached_tokens=cached_tokens)))

    def ready(self) -> None:
        self.put(decode_pb2.DecodeEvent(ready=decode_pb2.Ready()))

    def extended(self, next_index: int) -> None:
        self.put(decode_pb2.DecodeEvent(extended=decode_pb2.Extended(next_index=next_index)))

    def tokens(self, first_index: int, *ids: int) -> None:
        chunk = token_run_to_proto(TokenRun(first_index, ids), SOURCES[self._role])
        self.put(decode_pb2.DecodeEvent(tokens=chunk))

    def paused(self, next_index: int) -> None:
        self.put(decode_pb2.DecodeEvent(paused=decode_pb2.Paused(next_index=next_index)))

    def stopped(self, next_index: int) -> None:
        self.put(decode_pb2.DecodeEvent(stopped=decode_pb2.Stopped(next_index=next_index)))
        self.end()

    def finished(self, completion_tokens: int, reason: FinishReason = FinishReason.LENGTH) -> None:
        finished = common_pb2.Finished(reason=finish_reason_to_proto(reason), completion_tokens=completion_tokens)
        self.put(decode_pb2.DecodeEvent(finished=finished))
        self.end()

    def drained(self) -> None:
        self.put(decode_pb2.DecodeEvent(drained=decode_pb2.Drained()))
        self.end()

    async def read_in(self, messages: AsyncIterator[decode_pb2.DecodeRequest]) -> None:
        async for message in messages:
            self._in.put_nowait(message)


class FakePrefill(_Stream):
    """One Prefill call."""

    def __init__(self, request: prefill_pb2.PrefillRequest) -> None:
        super().__init__()
        self.request = request

    def started(self, cached_tokens: int = 0) -> None:
        self.put(prefill_pb2.PrefillEvent(started=prefill_pb2.PrefillStarted(cached_tokens=cached_tokens)))

    def first_token(self, token: int) -> None:
        self.put(prefill_pb2.PrefillEvent(first_token=token_run_to_proto(TokenRun(0, (token,)), Source.PREFILL)))

    def finished(self, reason: FinishReason) -> None:
        finished = common_pb2.Finished(reason=finish_reason_to_proto(reason), completion_tokens=1)
        self.put(prefill_pb2.PrefillEvent(finished=finished))

    def progress(self, role: Role, acked: int, missing: int) -> None:
        progress = prefill_pb2.PushProgress(
            transfer_id=self._target(role).transfer_id, payload_bytes_acked=acked, payload_bytes_missing=missing
        )
        self.put(prefill_pb2.PrefillEvent(push_progress=progress))

    def push_ended(self, role: Role, outcome: str = "committed") -> None:
        target = self._target(role)
        ended = prefill_pb2.PushEnded(
            transfer_id=target.transfer_id, instance_id=target.instance_id, outcome=PUSH_OUTCOMES[outcome]
        )
        self.put(prefill_pb2.PrefillEvent(push_ended=ended))

    def _target(self, role: Role) -> prefill_pb2.PushTarget:
        proto = {Role.RELAY: common_pb2.ROLE_RELAY, Role.MAIN: common_pb2.ROLE_MAIN}[role]
        return next(target for target in self.request.targets if target.role == proto)


@dataclass
class FakeStage(
    stage_pb2_grpc.StageServiceServicer, decode_pb2_grpc.DecodeServiceServicer, prefill_pb2_grpc.PrefillServiceServicer
):
    """One stage of any role. Its calls come out of `leg()` and `prefill()`, in order of arrival."""

    description: StageDescription
    load: StageLoad = StageLoad(max_running=8, blocks_total=1024, blocks_free=1024)
    reports: bool = True
    refusal: KvrelayError | None = None
    """Every new leg ends with it at once."""
    calls: int = 0
    _legs: asyncio.Queue[FakeLeg] = field(default_factory=asyncio.Queue)
    _prefills: asyncio.Queue[FakePrefill] = field(default_factory=asyncio.Queue)
    _load_changed: asyncio.Event = field(default_factory=asyncio.Event)
    _hang_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def leg(self) -> FakeLeg:
        """The next Decode call."""
        async with asyncio.timeout(WAIT_S):
            return await self._legs.get()

    @property
    def legs_waiting(self) -> int:
        """Decode calls that `leg` has not given yet."""
        return self._legs.qsize()

    async def prefill(self) -> FakePrefill:
        """The next Prefill call."""
        async with asyncio.timeout(WAIT_S):
            return await self._prefills.get()

    def report(self, **changes: Any) -> None:
        """Sends a load report."""
        self.load = replace(self.load, **changes)
        self._load_changed.set()

    def leave(self) -> None:
        """Ends its load streams."""
        self._hang_up.set()
        self._load_changed.set()

    async def Describe(self, request: Any, context: Any) -> stage_pb2.StageInfo:
        """Part of StageService."""
        return description_to_proto(self.description)

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[stage_pb2.LoadReport]:  # type: ignore[override]
        """Part of StageService."""
        while self.reports:
            yield load_to_proto(self.load)
            await self._load_changed.wait()
            self._load_changed.clear()
            if self._hang_up.is_set():
                self._hang_up.clear()
                return
        await asyncio.Event().wait()

    async def FlushCache(self, request: Any, context: Any) -> stage_pb2.FlushCacheReply:
        """Part of StageService."""
        return stage_pb2.FlushCacheReply()

    async def Drain(self, request: Any, context: Any) -> stage_pb2.DrainReply:
        """Part of StageService."""
        return stage_pb2.DrainReply()

    async def Decode(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        """Part of DecodeService."""
        messages = aiter(request_iterator)
        opening = (await anext(messages)).open
        if self.refusal is not None:
            raise self.refusal
        leg = FakeLeg(opening, self.description.role)
        await self._serve(leg, self._legs, context, leg.read_in(messages))

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> None:  # type: ignore[override]
        """Part of PrefillService."""
        if self.refusal is not None:
            raise self.refusal
        await self._serve(FakePrefill(request), self._prefills, context, None)

    async def _serve(self, call: Any, queue: asyncio.Queue[Any], context: Any, reading: Any) -> None:
        self.calls += 1
        reader = asyncio.ensure_future(reading) if reading is not None else None
        queue.put_nowait(call)
        try:
            await call.write_out(context)
        finally:
            self.calls -= 1
            if reader is not None:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)


@asynccontextmanager
async def fake_stage(
    role: Role, instance_id: str, listen: str = "127.0.0.1:0", **changes: Any
) -> AsyncIterator[FakeStage]:
    """A scripted stage at `.description.address`."""
    stage = FakeStage(described(role, instance_id, **changes))

    def register(server: grpc.aio.Server) -> None:
        stage_pb2_grpc.add_StageServiceServicer_to_server(stage, server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(stage, server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(stage, server)

    async with grpc_server(listen, register, [], grace_s=0.0) as server:
        stage.description = replace(stage.description, address=server.address)
        yield stage
