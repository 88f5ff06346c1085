"""One prefill being served: joins the engine's events and the ends of the pushes. Holds what the call holds."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvrelay.engine import events
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.proto.v1 import prefill_pb2
from kvrelay.rpc import convert
from kvrelay.stage import reply
from kvrelay.stage.core import StageCore
from kvrelay.stage.inbox import Inbox
from kvrelay.stage.intake import Lease
from kvrelay.transfer.feed import BlockFeed
from kvrelay.transfer.outgoing import OutgoingTransfer
from kvrelay.transfer.push import PushOutcome, PushProgress, PushResult
from kvrelay.transfer.sender import KvSender
from kvrelay.types import KvTarget, Source

log = logging.getLogger(__name__)

DONE, CUT = "DONE", "CUT"
"""How a prefill ended: computed and every push ended, or anything else."""

PROGRESS_GAP_S = 0.2
"""Least time between two PushProgress of one push."""

_OUTCOMES = {
    PushOutcome.COMMITTED: prefill_pb2.PushEnded.OUTCOME_COMMITTED,
    PushOutcome.ENDED: prefill_pb2.PushEnded.OUTCOME_ENDED,
    PushOutcome.FAILED: prefill_pb2.PushEnded.OUTCOME_FAILED,
}


@dataclass(frozen=True, slots=True)
class PushNews:
    """How far a push is, or how it ended."""

    target: KvTarget
    what: PushProgress | PushResult


Item = events.Event | PushNews


class ServedPrefill:
    """`await run(write)`, and then `await release()` whatever became of it."""

    def __init__(
        self, core: StageCore, sender: KvSender, lease: Lease, spec: SequenceSpec, targets: Sequence[KvTarget]
    ) -> None:
        """Queues the prompt with the engine. Raises InvalidRequest, Overloaded, StageFailed; then it holds nothing."""
        self._core = core
        self._sender = sender
        self._lease = lease
        self._spec = spec
        self._targets = targets
        self._inbox: Inbox[Item] = Inbox()
        self._feed: BlockFeed | None = None
        self._pushes: list[OutgoingTransfer] = []
        self._pushes_left = len(targets)
        self._computing = True
        self._handle = core.driver.open(spec)
        lease.state = "QUEUED"

    async def run(self, write: Callable[[prefill_pb2.PrefillEvent], Awaitable[None]]) -> None:
        """Returns when all is computed and every push has ended. Raises the KvrelayError that ended it."""
        async with self._inbox as inbox:
            inbox.read(self._handle)
            while self._computing or self._pushes_left:
                event = self._take(await inbox.next())
                if event is not None:
                    await write(event)
        self._lease.state = DONE

    async def release(self) -> None:
        """Ends what is still pushed, and gives the blocks back once nothing reads them."""
        for push in self._pushes:
            push.cancel()
        await asyncio.gather(*(push.done() for push in self._pushes))
        await self._handle.close()
        self._core.metrics.legs.labels(DONE if self._lease.state == DONE else CUT).inc()
        log.info("prefill released in state %s, pushes cut: %d", self._lease.state, self._pushes_left)

    def _take(self, item: Item) -> prefill_pb2.PrefillEvent | None:
        match item:
            case events.Admitted():
                return self._admitted(item)
            case events.Computed():
                self._published().publish(item.blocks)
                return None
            case events.Tokens():
                self._core.metrics.tokens.inc(len(item.run.ids))
                return prefill_pb2.PrefillEvent(first_token=convert.token_run_to_proto(item.run, Source.PREFILL))
            case events.Finished():
                self._computed()
                return prefill_pb2.PrefillEvent(finished=reply.finish(item))
            case events.Failed():
                raise item.error
            case PushNews():
                return self._news(item)
            case events.Paused() | events.CaughtUp() | events.Stopped():
                self._computed()
                return None

    def _admitted(self, event: events.Admitted) -> prefill_pb2.PrefillEvent:
        self._lease.state = "COMPUTING"
        self._core.metrics.prompt_tokens.inc(len(self._spec.prompt_ids))
        self._core.metrics.hit_tokens.inc(event.cached_tokens)
        self._feed = BlockFeed(event.block_ids)
        self._feed.publish(event.cached_tokens // self._core.description.layout.block_tokens)
        for target in self._targets:
            push = self._sender.push(target, self._lease.request_id, self._feed)
            self._pushes.append(push)
            self._inbox.read(_follow(target, push))
        return prefill_pb2.PrefillEvent(started=prefill_pb2.PrefillStarted(cached_tokens=event.cached_tokens))

    def _computed(self) -> None:
        self._computing = False
        self._lease.state = "PUSHING"

    def _published(self) -> BlockFeed:
        assert self._feed is not None, "computed before it was admitted"
        return self._feed

    def _news(self, news: PushNews) -> prefill_pb2.PrefillEvent:
        if isinstance(news.what, PushProgress):
            progress = prefill_pb2.PushProgress(
                transfer_id=news.target.transfer_id,
                payload_bytes_acked=news.what.payload_bytes_acked,
                payload_bytes_missing=news.what.payload_bytes_missing,
            )
            return prefill_pb2.PrefillEvent(push_progress=progress)
        self._pushes_left -= 1
        return self._push_ended(news.target, news.what)

    def _push_ended(self, target: KvTarget, result: PushResult) -> prefill_pb2.PrefillEvent:
        self._core.metrics.pushed(
            target.instance_id,
            wire_bytes=result.wire_bytes,
            saved_bytes=result.blocks_cached * self._core.description.layout.block_bytes,
            seconds=result.seconds,
            outcome=result.outcome,
        )
        if result.outcome is PushOutcome.FAILED:
            self._core.metrics.fallbacks.labels("push_failed").inc()
        ended = prefill_pb2.PushEnded(
            transfer_id=target.transfer_id,
            instance_id=target.instance_id,
            outcome=_OUTCOMES[result.outcome],
            detail=result.detail,
            wire_bytes=result.wire_bytes,
            blocks_sent=result.blocks_sent,
            blocks_cached=result.blocks_cached,
            seconds=result.seconds,
        )
        return prefill_pb2.PrefillEvent(push_ended=ended)


async def _follow(target: KvTarget, push: OutgoingTransfer) -> AsyncIterator[PushNews]:
    """Progress at most every PROGRESS_GAP_S, and then the end, at once."""
    end = asyncio.ensure_future(push.done())
    try:
        seen: PushProgress | None = None
        while (seen := await push.progressed(seen)) is not None:
            yield PushNews(target, seen)
            await asyncio.wait({end}, timeout=PROGRESS_GAP_S)
        yield PushNews(target, await end)
    finally:
        end.cancel()
