"""One load run: conversations arrive, are asked turn by turn, and each request leaves a record. Knows no format."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvrelay.load.arrival import Arrival
from kvrelay.load.client import HANDOFF_MODES, PIPELINES, Answer, ask
from kvrelay.load.workload import Conversation, Turn
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc


@dataclass(frozen=True, slots=True)
class Record:
    """One request, flat, as the JSONL line has it. Times in ms by the client's clock unless said otherwise."""

    conversation: str
    turn: int
    request_id: str
    ok: bool
    error: str
    sent_s: float
    """Since the run began."""
    prompt_tokens: int
    output_tokens: int
    pipeline: str
    reason: str
    hit_prefill: float
    hit_main: float
    tokens_prefill: int
    tokens_relay: int
    tokens_main: int
    ttft_ms: float | None
    ttst_ms: float | None
    tpot_ms: float | None
    e2el_ms: float
    itl_ms: list[float]
    handoff_mode: str
    handoff_stall_ms: float | None
    """At the router."""
    max_gap_ms: float
    """At the router."""
    wan_bytes: int
    fallbacks: list[str]


Observer = Callable[[Record], None]


class LoadRun:
    """Asks a router; `records` grow as requests end, and `observe` sees each."""

    def __init__(
        self,
        router: "router_pb2_grpc.RouterServiceAsyncStub",
        template: router_pb2.GenerateRequest,
        *,
        timeout_s: float,
        observe: Observer = lambda record: None,
    ) -> None:
        self.records: list[Record] = []
        self.wall_s = 0.0
        self._router = router
        self._template = template
        self._timeout_s = timeout_s
        self._observe = observe
        self._began_s = time.perf_counter()

    async def warm_up(self, conversations: Iterable[Conversation]) -> list[str]:
        """Asks one after the other, unrecorded; the errors, if any."""
        errors = []
        for conversation in conversations:
            prompt = [*conversation.opening_ids, *conversation.turns[0].fresh_ids]
            answer = await self._ask(prompt, conversation.turns[0])
            errors += [answer.error] if answer.error else []
        return errors

    async def measure(self, conversations: Iterable[Conversation], arrival: Arrival) -> None:
        """Runs them all."""
        self._began_s = time.perf_counter()
        await arrival.drive(conversations, self._serve)
        self.wall_s = time.perf_counter() - self._began_s

    async def _serve(self, conversation: Conversation) -> None:
        history = list(conversation.opening_ids)
        for number, turn in enumerate(conversation.turns):
            history += turn.fresh_ids
            answer = await self._ask(history, turn)
            record = record_of(answer, conversation.name, number, len(history), self._began_s)
            self.records.append(record)
            self._observe(record)
            if not answer.ok:
                return
            history += answer.ids

    async def _ask(self, prompt: list[int], turn: Turn) -> Answer:
        request = router_pb2.GenerateRequest()
        request.CopyFrom(self._template)
        request.token_ids.ids.extend(prompt)
        request.sampling.MergeFrom(common_pb2.Sampling(max_tokens=turn.max_tokens, seed=turn.seed))
        return await ask(self._router, request, timeout_s=self._timeout_s)


def record_of(answer: Answer, conversation: str, turn: int, prompt_tokens: int, began_s: float) -> Record:
    """Flattens an answer."""
    completed = answer.completed or router_pb2.Completed()
    report, usage = completed.report, completed.usage
    stalled = report.HasField("handoff_stall_ms")
    return Record(
        conversation=conversation,
        turn=turn,
        request_id=answer.request_id,
        ok=answer.ok,
        error=answer.error,
        sent_s=answer.sent_at_s - began_s,
        prompt_tokens=prompt_tokens,
        output_tokens=len(answer.ids),
        pipeline=PIPELINES.get(report.pipeline, ""),
        reason=report.reason,
        hit_prefill=usage.cached_prefill_tokens / prompt_tokens,
        hit_main=usage.cached_main_tokens / prompt_tokens,
        tokens_prefill=answer.count("prefill"),
        tokens_relay=answer.count("relay"),
        tokens_main=answer.count("main"),
        ttft_ms=answer.ttft_ms,
        ttst_ms=answer.ttst_ms,
        tpot_ms=answer.tpot_ms,
        e2el_ms=answer.e2el_ms,
        itl_ms=answer.itl_ms,
        handoff_mode=HANDOFF_MODES.get(report.handoff_mode, ""),
        handoff_stall_ms=report.handoff_stall_ms if stalled else None,
        max_gap_ms=report.max_gap_ms,
        wan_bytes=report.wan_bytes,
        fallbacks=list(report.fallbacks),
    )
