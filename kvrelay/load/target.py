"""Whom a load run asks: how to open it and put one request to it. Another kind of server would be another Target."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from kvrelay.load.client import HANDOFF_MODES, PIPELINES, Answer, ask
from kvrelay.load.hostile import Manner
from kvrelay.load.record import LETTERS, Record
from kvrelay.load.workload import Ask
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel

FINISHES = {
    common_pb2.FINISH_REASON_EOS: "eos",
    common_pb2.FINISH_REASON_STOP_TOKEN: "stop_token",
    common_pb2.FINISH_REASON_STOP_STRING: "stop_string",
    common_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of one request."""

    record: Record
    """But for what only the run knows: due_s, sent_s, queue_ms, warm_up."""
    ids: tuple[int, ...]
    """The answer's, to go on from; as many as came."""
    sent_at_s: float
    """On time.perf_counter's clock."""


class OpenTarget(Protocol):
    """A target that is open."""

    async def ask(self, ask: Ask, manner: Manner, timeout_s: float) -> Reply:
        """Puts one request and follows its answer to the end. A failure is the record's, never an exception."""


class Target(Protocol):
    """How to open a target. Picklable, so that other processes can."""

    def open(self) -> AbstractAsyncContextManager[OpenTarget]:
        """Open until the end of the block."""


@dataclass(frozen=True, slots=True)
class RouterTarget:
    """kvrelay's router."""

    address: str
    template: bytes = b""
    """A serialized GenerateRequest: what every request says, such as its sampling and a forced pipeline."""
    channels: int = 1
    """Connections; requests take turns."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator["OpenRouter"]:
        """See Target."""
        channels = [open_channel(self.address, Purpose.TOKENS) for _ in range(self.channels)]
        try:
            yield OpenRouter([router_pb2_grpc.RouterServiceStub(channel) for channel in channels], self.template)
        finally:
            for channel in channels:
                await channel.close()


class OpenRouter:
    """A router's stubs."""

    def __init__(self, routers: "list[router_pb2_grpc.RouterServiceAsyncStub]", template: bytes) -> None:
        self._routers = routers
        self._template = router_pb2.GenerateRequest.FromString(template)
        self._turn = 0

    async def ask(self, ask_: Ask, manner: Manner, timeout_s: float) -> Reply:
        """See OpenTarget."""
        self._turn = (self._turn + 1) % len(self._routers)
        answer = await ask(
            self._routers[self._turn],
            request_of(ask_, self._template),
            timeout_s=timeout_s,
            pause_s=manner.pause_s,
            leave_after_s=manner.leaves_after_s,
        )
        return Reply(record_of(answer, ask_), tuple(answer.ids), answer.sent_at_s)


def request_of(ask_: Ask, template: router_pb2.GenerateRequest) -> router_pb2.GenerateRequest:
    """The message, as the template has it but for what the Ask says."""
    request = router_pb2.GenerateRequest()
    request.CopyFrom(template)
    request.token_ids.ids.extend(ask_.prompt_ids)
    request.sampling.max_tokens = ask_.max_tokens
    request.sampling.seed = ask_.seed
    return request


def record_of(answer: Answer, ask_: Ask) -> Record:
    """Flattens an answer."""
    completed = answer.completed or router_pb2.Completed()
    report, usage = completed.report, completed.usage
    started = answer.started or router_pb2.Started()
    route = report.route if report.HasField("route") else started.route
    return Record(
        conversation=ask_.conversation,
        turn=ask_.turn,
        outcome="failed" if answer.error else "cancelled" if answer.left else "ok",
        request_id=answer.request_id,
        error=answer.error,
        failed_leg=leg_of(answer.error),
        manner=ask_.manner,
        prompt_tokens=len(ask_.prompt_ids),
        wanted_tokens=ask_.max_tokens,
        output_tokens=len(answer.ids),
        finish=FINISHES.get(completed.reason, ""),
        planned=PIPELINES.get(route.pipeline, ""),
        pipeline=PIPELINES.get(report.pipeline, ""),
        reason=report.reason,
        prefill=route.prefill,
        relay=route.relay,
        main=route.main,
        cached_prefill_tokens=usage.cached_prefill_tokens,
        cached_relay_tokens=usage.cached_relay_tokens,
        cached_main_tokens=usage.cached_main_tokens,
        arrived_ms=tuple(answer.arrived_ms),
        sources="".join(LETTERS.get(source, "s") for source in answer.sources),
        e2el_ms=answer.e2el_ms,
        handoff_mode=HANDOFF_MODES.get(report.handoff_mode, ""),
        handoff_rounds=report.handoff_rounds,
        handoff_ids=report.handoff_ids,
        handoff_stall_ms=report.handoff_stall_ms if report.HasField("handoff_stall_ms") else None,
        router_max_gap_ms=report.max_gap_ms,
        router_ttft_ms=report.ttft_ms,
        relay_dropped=report.relay_dropped,
        wan_bytes=report.wan_bytes,
        fallbacks=tuple(report.fallbacks),
        timeline=tuple((event.name, event.at_ms) for event in report.timeline),
        seed=ask_.seed,
    )


def leg_of(error: str) -> str:
    """The leg that an error's text names first; empty if none."""
    places = {leg: error.find(leg) for leg in ("prefill", "relay", "main")}
    named = [leg for leg, place in places.items() if place >= 0]
    return min(named, key=places.__getitem__, default="")
