"""Real stages in this process, and the other side of their streams: a router's leg, and a source of KV."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, Self

import grpc

from kvrelay.engine.config import EngineConfig
from kvrelay.engine.engine import Engine
from kvrelay.engine.events import Admitted
from kvrelay.engine.reference import generate_reference
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.model.weights import LoadedModel, load_model
from kvrelay.proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from kvrelay.rpc import convert
from kvrelay.rpc.channels import open_channel
from kvrelay.settings import StageSettings
from kvrelay.stage.app import StageApp
from kvrelay.transfer.feed import BlockFeed
from kvrelay.transfer.outgoing import OutgoingTransfer
from kvrelay.transfer.sender import KvSender
from kvrelay.types import KvTarget, Role, Sampling
from services.main_decode.app import main_decode_app
from services.prefill.app import prefill_app
from services.prefill.config import PrefillSettings
from services.relay_decode.app import relay_decode_app

PATIENCE_S = 5.0
_numbers = itertools.count()


@asynccontextmanager
async def stage(role: Role, *, settles: bool = True, **overrides: Any) -> AsyncIterator[StageApp]:
    """A stage with the tiny model on a free port. After the body it must have released everything."""
    wanted = {"model": "tiny", "threads": 1, "pool_tokens": 2048, "shutdown_grace_s": 0.2, **overrides}
    if role is Role.PREFILL:
        running = prefill_app(PrefillSettings(**wanted))
    else:
        app = relay_decode_app if role is Role.RELAY else main_decode_app
        running = app(StageSettings(**wanted))
    async with running as found:
        yield found
        if settles:
            await found.settle()


@lru_cache
def tiny(block_tokens: int = 16) -> LoadedModel:
    """The tiny model, for the reference and for sources of KV."""
    return load_model("tiny", block_tokens=block_tokens)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Ids that differ from seed to seed in the first place already."""
    return [(seed * 31 + 7 + i * i * 3 + i) % 250 for i in range(length)]


def sampling(max_tokens: int = 12, **changes: Any) -> Sampling:
    """Seeded sampling that no EOS ends."""
    return Sampling(**{"seed": 5, "max_tokens": max_tokens, "temperature": 0.8, "ignore_eos": True, **changes})


@lru_cache(maxsize=256)
def _reference(ids: tuple[int, ...], how: Sampling) -> tuple[int, ...]:
    return generate_reference(tiny(), ids, how, with_margins=False).ids


def reference(ids: Sequence[int], how: Sampling) -> list[int]:
    """One engine's answer."""
    return list(_reference(tuple(ids), how))


class LegCall:
    """A router's side of one decode leg."""

    def __init__(self, app: StageApp, call: Any) -> None:
        self.app = app
        self.call = call
        self.events: list[str] = []
        self.ids: list[int] = []
        """Tokens that came, in order; their indexes are checked."""
        self.next_index = 0

    async def send(self, **message: Any) -> None:
        """One DecodeRequest: extend=, resume=, stop=, open=."""
        await self.call.write(decode_pb2.DecodeRequest(**message))

    async def extend(self, ids: Sequence[int], *, final: bool = False, first_index: int | None = None) -> None:
        """The next known ids."""
        first = self.next_index if first_index is None else first_index
        await self.send(extend=decode_pb2.Extend(first_index=first, ids=ids, final=final))
        self.next_index += len(ids)

    async def resume(self, ids: Sequence[int] = (), *, first_index: int | None = None) -> None:
        """The next known ids, and go."""
        first = self.next_index if first_index is None else first_index
        await self.send(resume=decode_pb2.Resume(first_index=first, ids=ids))
        self.next_index += len(ids)

    async def stop(self) -> None:
        """Sample no more."""
        await self.send(stop=decode_pb2.Stop())

    async def next(self) -> decode_pb2.DecodeEvent | None:
        """The next event; None at the clean end."""
        async with asyncio.timeout(PATIENCE_S):
            event = await self.call.read()
        if event is grpc.aio.EOF:
            return None
        kind = event.WhichOneof("event")
        self.events.append(kind)
        if kind == "tokens":
            assert event.tokens.first_index == self.next_index, f"gap or repeat at {self.next_index}: {event}"
            assert event.tokens.source == common_pb2.Source.Value(f"SOURCE_{self.app.description.role.name}")
            self.ids += event.tokens.ids
            self.next_index += len(event.tokens.ids)
        return event

    async def until(self, kind: str) -> Any:
        """Reads up to the first event of this kind, and returns it."""
        while (event := await self.next()) is not None:
            if event.WhichOneof("event") == kind:
                return getattr(event, kind)
        raise AssertionError(f"the stream ended without {kind}: {self.events}")

    async def expect(self, kind: str) -> Any:
        """The next event, which must be of this kind."""
        event = await self.next()
        assert event is not None and event.WhichOneof("event") == kind, f"{kind} expected, got {event} ({self.events})"
        return getattr(event, kind)

    async def ended(self) -> None:
        """The stream ends here, cleanly."""
        await self.call.done_writing()
        event = await self.next()
        assert event is None, f"end expected, got {event}"
        assert await self.call.code() is grpc.StatusCode.OK

    async def refused(self) -> tuple[grpc.StatusCode, str]:
        """The stream ends here, with this status."""
        try:
            while await self.next() is not None:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError(f"not refused: {self.events}")

    async def in_state(self, state: str) -> Self:
        """Returns once the stage says that this is the state of a leg of its."""
        async with asyncio.timeout(PATIENCE_S):
            while state not in self.app.core.intake.states():  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        return self

    def cancel(self) -> None:
        """The client goes away."""
        self.call.cancel()


def open_message(app: StageApp, ids: Sequence[int], how: Sampling, **changes: Any) -> decode_pb2.OpenLeg:
    """An OpenLeg with a new transfer id, unless it is local_prefill."""
    number = next(_numbers)
    wanted = {
        "request_id": f"r{number}",
        "transfer_id": "" if changes.get("local_prefill") else f"t{number}",
        "prompt_ids": ids,
        "sampling": convert.sampling_to_proto(how),
        "epoch": app.description.epoch,
    }
    return decode_pb2.OpenLeg(**{**wanted, **changes})


@asynccontextmanager
async def raw_leg(app: StageApp) -> AsyncIterator[LegCall]:
    """A Decode stream on a channel of its own, with nothing sent; cancelled after the body."""
    async with open_channel(app.address) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Decode()
        try:
            yield LegCall(app, call)
        finally:
            call.cancel()


@asynccontextmanager
async def leg(app: StageApp, ids: Sequence[int], how: Sampling, **changes: Any) -> AsyncIterator[tuple[LegCall, str]]:
    """An opened leg and its transfer id."""
    message = open_message(app, ids, how, **changes)
    async with raw_leg(app) as opened:
        await opened.send(open=message)
        yield opened, message.transfer_id


class KvSource:
    """Computes prompts in an engine of its own and pushes as many of their blocks as the test says."""

    def __init__(self, sender: KvSender, engine: Engine) -> None:
        self._sender = sender
        self._engine = engine

    def compute(self, ids: Sequence[int]) -> BlockFeed:
        """The prompt's whole blocks, computed; none is published yet."""
        name = f"kv{next(_numbers)}"
        self._engine.add(SequenceSpec(name, list(ids), sampling(), sample=False))
        feed: BlockFeed | None = None
        while self._engine.has_work():
            for _, event in self._engine.step():
                if isinstance(event, Admitted):
                    feed = BlockFeed(event.block_ids)
        assert feed is not None
        return feed

    def push(self, app: StageApp, transfer_id: str, feed: BlockFeed, blocks: int | None = None) -> OutgoingTransfer:
        """Publishes the first blocks (all, unless told), and pushes."""
        feed.publish(len(feed.block_ids) if blocks is None else blocks)
        about = app.description
        target = KvTarget(about.instance_id, about.address, about.epoch, transfer_id, about.role)
        return self._sender.push(target, transfer_id, feed)

    def feed(self, app: StageApp, transfer_id: str, ids: Sequence[int], blocks: int | None = None) -> OutgoingTransfer:
        """Computes and pushes."""
        return self.push(app, transfer_id, self.compute(ids), blocks)


@asynccontextmanager
async def kv_source(block_tokens: int = 16) -> AsyncIterator[KvSource]:
    """A source of KV with the tiny model."""
    loaded = tiny(block_tokens)
    engine = Engine(loaded, EngineConfig(pool_blocks=256))
    async with KvSender(engine.pool, loaded.layout, resume_wait_s=1.0) as sender:
        yield KvSource(sender, engine)


class PrefillCall:
    """A router's side of one prefill."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.events: list[prefill_pb2.PrefillEvent] = []

    async def until(self, kind: str) -> Any:
        """Reads up to the first event of this kind, and returns it."""
        async with asyncio.timeout(PATIENCE_S):
            async for event in self.call:
                self.events.append(event)
                if event.WhichOneof("event") == kind:
                    return getattr(event, kind)
        raise AssertionError(f"the stream ended without {kind}: {self.events}")

    async def rest(self) -> list[prefill_pb2.PrefillEvent]:
        """Reads to the clean end; all events from the first one on."""
        async with asyncio.timeout(PATIENCE_S):
            async for event in self.call:
                self.events.append(event)
        return self.events

    def ends(self) -> dict[str, prefill_pb2.PushEnded]:
        """PushEnded by transfer id, of the events so far."""
        return {
            event.push_ended.transfer_id: event.push_ended
            for event in self.events
            if event.WhichOneof("event") == "push_ended"
        }


def target(app: StageApp, transfer_id: str, **changes: Any) -> prefill_pb2.PushTarget:
    """Where a decode stage takes KV."""
    about = app.description
    wanted = KvTarget(about.instance_id, about.address, about.epoch, transfer_id, about.role)
    message = convert.kv_target_to_proto(wanted)
    message.MergeFrom(prefill_pb2.PushTarget(**changes))
    return message


@asynccontextmanager
async def prefill(
    app: StageApp, ids: Sequence[int], how: Sampling, targets: Sequence[prefill_pb2.PushTarget] = (), **changes: Any
) -> AsyncIterator[PrefillCall]:
    """An open Prefill stream; cancelled after the body."""
    wanted = {
        "request_id": f"r{next(_numbers)}",
        "prompt_ids": ids,
        "sampling": convert.sampling_to_proto(how),
        "targets": targets,
        "epoch": app.description.epoch,
    }
    async with open_channel(app.address) as channel:
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(prefill_pb2.PrefillRequest(**{**wanted, **changes}))
        try:
            yield PrefillCall(call)
        finally:
            call.cancel()
