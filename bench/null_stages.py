"""Stages that answer at once, for bench.router: no model, no KV. Also a bare forwarder.

`python -m bench.null_stages KIND ...` serves until its input ends; its first line of output is its ports as JSON.
`sampling.seed` is the pace: 0 = all tokens at once, one a message; n = one a message, every n microseconds;
`BACKLOG` + n = n tokens a second, of which a message carries what is due when the one before it was taken.
"""

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import grpc
import uvloop

from bench.null_http import serve_http
from kvrelay.proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    stage_pb2,
    stage_pb2_grpc,
)
from kvrelay.rpc.channels import COMMON_OPTIONS, Purpose, open_channel
from kvrelay.rpc.convert import description_to_proto
from kvrelay.text.tokenizer import load_tokenizer
from kvrelay.types import LayoutFingerprint, Role, StageDescription

SERVER_OPTIONS = (*COMMON_OPTIONS, ("grpc.http2.max_ping_strikes", 0))
"""As the product's: who waits for its turn pings meanwhile, and would be sent away for it."""
RELAYED_TOKENS = 4
"""Tokens that a relay leg sends before main decode is ready."""
CROSSING_S = 0.005
"""Main decode is ready so long after that: the router has read them by then."""
RELAY_STEP_S = 0.008
"""Between the relay's later tokens, until it is told to stop."""
BACKLOG = 1_000_000_000

_SOURCES = {Role.RELAY: common_pb2.SOURCE_RELAY, Role.MAIN: common_pb2.SOURCE_MAIN}
_Event = decode_pb2.DecodeEvent


class Story:
    """What the legs of one request know of each other."""

    def __init__(self) -> None:
        self.relayed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.relay_done = asyncio.Event()


class NullStage(
    stage_pb2_grpc.StageServiceServicer, decode_pb2_grpc.DecodeServiceServicer, prefill_pb2_grpc.PrefillServiceServicer
):
    """One stage of any role."""

    def __init__(self, name: str, role: Role, stories: dict[str, Story], report: stage_pb2.LoadReport) -> None:
        self.role = role
        self.address = ""
        self.reports_s = 1.0
        self._name = name
        self._stories = stories
        self._report = report

    def _story(self, request_id: str) -> Story:
        return self._stories.setdefault(request_id, Story())

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Any) -> stage_pb2.StageInfo:
        tokenizer = load_tokenizer("tiny")
        return description_to_proto(
            StageDescription(
                instance_id=self._name,
                epoch=1,
                role=self.role,
                site="b" if self.role is Role.MAIN else "a",
                address=self.address,
                model="tiny",
                tokenizer=tokenizer.identity,
                layout=LayoutFingerprint("w", 2, 2, 8, 16, "float64", "default"),
                vocab_size=tokenizer.vocab_size,
                max_model_tokens=1 << 20,
                pool_blocks=1 << 16,
                max_running=64,
                eos_token_ids=(257,),
            )
        )

    async def WatchLoad(self, request: stage_pb2.WatchLoadRequest, context: Any) -> None:  # type: ignore[override]
        while True:
            await context.write(self._report)
            await asyncio.sleep(self.reports_s)

    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> None:  # type: ignore[override]
        story = self._story(request.request_id)
        if not story.relayed.done():
            story.relayed.set_result(any(target.role == common_pb2.ROLE_RELAY for target in request.targets))
        first = common_pb2.TokenChunk(ids=[1], source=common_pb2.SOURCE_PREFILL)
        await context.write(prefill_pb2.PrefillEvent(first_token=first))
        for target in request.targets:
            ended = prefill_pb2.PushEnded(
                transfer_id=target.transfer_id,
                instance_id=target.instance_id,
                outcome=prefill_pb2.PushEnded.OUTCOME_COMMITTED,
            )
            await context.write(prefill_pb2.PrefillEvent(push_ended=ended))

    async def Decode(  # type: ignore[override]
        self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: Any
    ) -> None:
        leg = (await anext(request_iterator)).open
        story = self._story(leg.request_id)
        await context.write(_Event(opened=decode_pb2.Opened()))
        if self.role is Role.MAIN and leg.transfer_id and await story.relayed:
            await story.relay_done.wait()
            await asyncio.sleep(CROSSING_S)
        await context.write(_Event(ready=decode_pb2.Ready()))
        resume = (await anext(request_iterator)).resume
        index, last = resume.first_index + len(resume.ids), leg.sampling.max_tokens
        if self.role is Role.RELAY:
            upto = min(index + RELAYED_TOKENS, last)
            await self._speak(context.write, index, upto, leg.sampling.seed)
            story.relay_done.set()
            await self._until_stopped(context.write, request_iterator, range(upto, last - 1))
            await context.write(_Event(stopped=decode_pb2.Stopped(next_index=last)))
            return
        await self._speak(context.write, index, last, leg.sampling.seed)
        finished = common_pb2.Finished(reason=common_pb2.FINISH_REASON_LENGTH, completion_tokens=last)
        await context.write(_Event(finished=finished))
        self._stories.pop(leg.request_id, None)

    async def _until_stopped(
        self, write: Callable[[Any], Any], hears: AsyncIterator[decode_pb2.DecodeRequest], indexes: Iterable[int]
    ) -> None:
        """A relay speaks until it is told to stop, as a real one: the hand-off comes right after one of its tokens."""
        stop = asyncio.ensure_future(anext(hears))
        for index in indexes:
            if (await asyncio.wait({stop}, timeout=RELAY_STEP_S))[0]:
                break
            await self._speak(write, index, index + 1, 0)
        await stop

    async def _speak(self, write: Callable[[Any], Any], first: int, last: int, pace: int) -> None:
        source, began, index = _SOURCES[self.role], time.perf_counter(), first
        while index < last:
            upto = index + 1
            if pace >= BACKLOG:
                due = int((time.perf_counter() - began) * (pace - BACKLOG))
                upto = min(last, max(upto, first + due))
            elif pace:
                wait_s = (index - first + 1) * pace / 1e6 - (time.perf_counter() - began)
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
            chunk = common_pb2.TokenChunk(first_index=index, ids=[5] * (upto - index), source=source)
            await write(_Event(tokens=chunk))
            index = upto


class Forwarder(router_pb2_grpc.RouterServiceServicer):
    """The least that a relay of one request over three legs can do: no plan, no checks, no text, no report."""

    def __init__(self, prefill: str, relay: str, main: str) -> None:
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(open_channel(prefill, Purpose.TOKENS))
        self._relay = decode_pb2_grpc.DecodeServiceStub(open_channel(relay, Purpose.TOKENS))
        self._main = decode_pb2_grpc.DecodeServiceStub(open_channel(main, Purpose.TOKENS))

    async def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> None:  # type: ignore[override]
        if request.pipeline == router_pb2.PIPELINE_MD:
            await self._one_leg(request, context)
        else:
            await self._three_legs(request, context)

    async def _one_leg(self, request: router_pb2.GenerateRequest, context: Any) -> None:
        call = self._main.Decode()
        opening = decode_pb2.OpenLeg(request_id=request.request_id, sampling=request.sampling, epoch=1)
        await call.write(decode_pb2.DecodeRequest(open=opening))
        await call.write(decode_pb2.DecodeRequest(resume=decode_pb2.Resume()))
        async for message in call:
            if message.HasField("tokens"):
                await context.write(router_pb2.GenerateReply(output=router_pb2.Output(tokens=message.tokens)))

    async def _three_legs(self, request: router_pb2.GenerateRequest, context: Any) -> None:
        inbox: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        ids, name, known, fenced = request.token_ids.ids, request.request_id, [1], False
        targets = [
            prefill_pb2.PushTarget(transfer_id=kind, role=role)
            for kind, role in (("r", common_pb2.ROLE_RELAY), ("m", common_pb2.ROLE_MAIN))
        ]
        asked = prefill_pb2.PrefillRequest(
            request_id=name, prompt_ids=ids, sampling=request.sampling, targets=targets, epoch=1
        )
        prefill, relay, main = self._prefill.Prefill(asked), self._relay.Decode(), self._main.Decode()

        async def read(kind: str, call: Any) -> None:
            with suppress(grpc.aio.AioRpcError) if kind == "r" else nullcontext():  # a Stop may meet an ended stream
                async for message in call:
                    inbox.put_nowait((kind, message))

        opening = decode_pb2.OpenLeg(
            request_id=name, transfer_id="t", prompt_ids=ids, sampling=request.sampling, epoch=1
        )
        for call in (relay, main):  # a call takes one message at a time: Resume must not overtake this
            await call.write(decode_pb2.DecodeRequest(open=opening))
        async with asyncio.TaskGroup() as tasks:
            for kind, call in (("p", prefill), ("r", relay), ("m", main)):
                tasks.create_task(read(kind, call))
            while True:
                kind, message = await inbox.get()
                what = message.WhichOneof("event")
                if kind == "r" and fenced:
                    continue
                if what in ("first_token", "tokens"):
                    chunk = getattr(message, what)
                    await context.write(router_pb2.GenerateReply(output=router_pb2.Output(tokens=chunk)))
                if what == "first_token":
                    await relay.write(decode_pb2.DecodeRequest(resume=decode_pb2.Resume(ids=known)))
                elif what == "tokens" and kind == "r":
                    known += chunk.ids
                elif what == "ready" and kind == "m":
                    fenced = True
                    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                        await relay.write(decode_pb2.DecodeRequest(stop=decode_pb2.Stop()))
                    await main.write(decode_pb2.DecodeRequest(resume=decode_pb2.Resume(ids=known)))
                elif what == "finished":
                    return


async def serve_stages(count: str = "3", reports_s: str = "1") -> list[int]:
    """Prefill, relay and main stages in turn, in this process; prefill stages report a link to each of the others."""
    stories: dict[str, Story] = {}
    ports = []
    roles = {f"{role}-{n}": role for n, role in zip(range(int(count)), itertools.cycle(Role), strict=False)}
    for name, role in roles.items():
        server = grpc.aio.server(options=SERVER_OPTIONS)
        report = stage_pb2.LoadReport(max_running=64, blocks_total=1 << 16, blocks_free=1 << 16)
        for peer in roles if role is Role.PREFILL else ():
            report.links.add(peer=peer, goodput_bytes_per_s=1e8)
        stage = NullStage(name, role, stories, report)  # type: ignore[abstract]
        stage.reports_s = float(reports_s)
        stage_pb2_grpc.add_StageServiceServicer_to_server(stage, server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(stage, server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(stage, server)
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        stage.address = f"127.0.0.1:{ports[-1]}"
        await server.start()
        _KEPT.append(server)
    return ports


async def serve_forwarder(*addresses: str) -> list[int]:
    """The forwarder, over these three stages."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    router_pb2_grpc.add_RouterServiceServicer_to_server(Forwarder(*addresses), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _KEPT.append(server)
    return [port]


_KEPT: list[Any] = []
"""Servers, for the life of this process."""


async def _serve(kind: str, *rest: str) -> None:
    serve: dict[str, Callable[..., Any]] = {"stages": serve_stages, "forwarder": serve_forwarder, "http": serve_http}
    print(json.dumps(await serve[kind](*rest)), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(_serve(*sys.argv[1:]))
