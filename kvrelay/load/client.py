"""One request as a client sees it: what came, when, whether the stream kept its contract. Knows the protos."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc

from kvrelay.load.times import TokenTimes
from kvrelay.proto.v1 import common_pb2, router_pb2, router_pb2_grpc

SOURCES = {
    common_pb2.SOURCE_PREFILL: "prefill",
    common_pb2.SOURCE_RELAY: "relay",
    common_pb2.SOURCE_MAIN: "main",
}
PIPELINES = {
    router_pb2.PIPELINE_P_RLD_MD: "p-rld-md",
    router_pb2.PIPELINE_P_MD: "p-md",
    router_pb2.PIPELINE_P_RLD: "p-rld",
    router_pb2.PIPELINE_MD: "md",
}
HANDOFF_MODES = {
    router_pb2.HANDOFF_MODE_DYNAMIC: "dynamic",
    router_pb2.HANDOFF_MODE_ONE_SHOT: "one-shot",
    router_pb2.HANDOFF_MODE_CATCH_UP: "catch-up",
}


@dataclass(slots=True)
class Answer(TokenTimes):
    """What one request got. Times are ms since it was sent, by this client's clock."""

    sent_at_s: float
    """On time.perf_counter's clock."""
    started: router_pb2.Started | None = None
    completed: router_pb2.Completed | None = None
    error: str = ""
    """Empty, or the status and its message, or how the stream broke its contract."""
    ids: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """One per id: "prefill", "relay" or "main"."""
    arrived_ms: list[float] = field(default_factory=list)
    """One per id; ids of one message share theirs."""
    text: str = ""
    e2el_ms: float = 0.0
    left: bool = False
    """The client left before the end: neither whole nor failed."""

    @property
    def ok(self) -> bool:
        """Whether the answer is whole."""
        return not self.error and not self.left

    @property
    def output_tokens(self) -> int:
        """As many as came."""
        return len(self.ids)

    @property
    def request_id(self) -> str:
        """As the router named it; empty if it never answered."""
        return self.started.request_id if self.started else ""

    def count(self, source: str) -> int:
        """Tokens from one kind of stage."""
        return self.sources.count(source)

    def take(self, reply: router_pb2.GenerateReply) -> None:
        """Adds one message of the stream."""
        kind = reply.WhichOneof("reply")
        if kind == "started":
            self.started = reply.started
        elif kind == "output":
            self._take_output(reply.output)
        elif kind == "completed":
            self.completed = reply.completed
            self.text += reply.completed.text

    def _take_output(self, output: router_pb2.Output) -> None:
        now_ms = (time.perf_counter() - self.sent_at_s) * 1e3
        tokens = output.tokens  # each look at a field of a message makes an object, and this is the generator's limit
        ids = tokens.ids
        if count := len(ids):
            if tokens.first_index != len(self.ids):
                self.error = f"token index {tokens.first_index} came, {len(self.ids)} was due"
            self.ids.extend(ids)
            self.sources.extend([SOURCES.get(tokens.source, "unknown")] * count)
            self.arrived_ms.extend([now_ms] * count)
        self.text += output.text

    def broken(self) -> str:
        """How an ended stream broke its contract; empty if it did not."""
        if self.started is None or self.completed is None:
            return "the stream was cut: it ended without a Completed message"
        usage = self.completed.usage
        by_stage = (usage.prefill_tokens, usage.relay_tokens, usage.main_tokens)
        seen = tuple(self.count(source) for source in SOURCES.values())
        if usage.completion_tokens != len(self.ids) or by_stage != seen:
            return f"usage says {usage.completion_tokens} tokens by stage {by_stage}, {len(self.ids)} {seen} came"
        return ""


def status_text(error: grpc.aio.AioRpcError) -> str:
    """ "UNAVAILABLE: no main stage is usable"."""
    return f"{error.code().name}: {error.details()}"


async def ask(
    router: "router_pb2_grpc.RouterServiceAsyncStub",
    request: router_pb2.GenerateRequest,
    *,
    timeout_s: float,
    on_reply: Callable[[Answer, router_pb2.GenerateReply], None] = lambda answer, reply: None,
    pause_s: float = 0.0,
    leave_after_s: float | None = None,
) -> Answer:
    """Sends one request and follows its stream to the end; `on_reply` sees each message after it was taken.

    A failure is the answer's `error`, never an exception. pause_s: before each next message is read.
    leave_after_s: the request is cancelled then, if its answer has not ended.
    """
    answer = Answer(sent_at_s=time.perf_counter())
    call = router.Generate(request, timeout=timeout_s)
    try:
        async with asyncio.timeout(leave_after_s):
            async for reply in call:
                answer.take(reply)
                on_reply(answer, reply)
                if pause_s:
                    await asyncio.sleep(pause_s)
        answer.error = answer.error or answer.broken()
    except TimeoutError:
        answer.left = True
    except grpc.aio.AioRpcError as error:
        answer.error = status_text(error)
    finally:
        call.cancel()  # a client that leaves between two messages has no read that could be cancelled
    answer.e2el_ms = (time.perf_counter() - answer.sent_at_s) * 1e3
    return answer
