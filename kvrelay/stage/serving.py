"""One leg being served: carries out what leg.py's table says, and holds what the leg holds. Decides nothing."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from kvrelay.engine import events
from kvrelay.engine.sequence import SequenceSpec
from kvrelay.errors import InvalidRequest
from kvrelay.proto.v1 import decode_pb2
from kvrelay.stage import reply
from kvrelay.stage.core import StageCore
from kvrelay.stage.inbox import Inbox
from kvrelay.stage.intake import Lease
from kvrelay.stage.leg import Action, Input, Leg
from kvrelay.transfer.receiver import IncomingTransfer, KvReceiver
from kvrelay.types import Role, Source

log = logging.getLogger(__name__)

CUT = "CUT"
"""How a leg ended that did not come to a terminal state: cancelled, refused or failed."""


@dataclass(frozen=True, slots=True)
class Committed:
    """All pushed blocks are here."""

    blocks_received: int


Item = decode_pb2.DecodeRequest | events.Event | Committed


class ServedLeg:
    """`await run()`, and then `await release()` whatever became of it."""

    def __init__(
        self,
        core: StageCore,
        receiver: KvReceiver,
        lease: Lease,
        transfer_id: str,
        spec: SequenceSpec,
        inbox: Inbox[Item],
        write: Callable[[decode_pb2.DecodeEvent], Awaitable[None]],
    ) -> None:
        """Queues the leg with the engine. Raises InvalidRequest, Overloaded, StageFailed; then it holds nothing.

        `inbox` gives the router's messages already, and is read by nobody else while the leg runs.
        """
        self._core = core
        self._receiver = receiver
        self._lease = lease
        self._transfer_id = transfer_id
        self._spec = spec
        self._write = write
        self._leg = Leg()
        self._inbox = inbox
        self._incoming: IncomingTransfer | None = None
        self._committed: Committed | None = None
        self._handle = core.driver.open(spec)
        lease.state = self._leg.state
        if transfer_id:
            receiver.announce(transfer_id)

    async def run(self) -> None:
        """Returns when the leg has ended and has said so. Raises the KvrelayError that ended it."""
        self._inbox.read(self._handle)
        while not self._leg.ended:
            item = await self._inbox.next()
            for action in self._decide(item):
                await self._act(action, item)

    async def release(self) -> None:
        """Fences the transfer, then gives all KV room back; leading blocks that came before a cut stay cached."""
        if self._transfer_id:
            self._receiver.end(self._transfer_id)
        loading = self._incoming if self._committed is None else None
        await self._handle.close(kept_blocks=loading.leading_blocks if loading else 0)
        self._core.metrics.legs.labels(self._leg.state if self._leg.ended else CUT).inc()
        log.info("leg released in state %s, next index %d", self._leg.state, self._leg.next_index)

    def _decide(self, item: Item) -> tuple[Action, ...]:
        actions = self._take(item)
        self._lease.state = self._leg.state
        return actions

    def _take(self, item: Item) -> tuple[Action, ...]:
        match item:
            case decode_pb2.DecodeRequest():
                return self._take_message(item)
            case Committed():
                self._committed = item
                return self._leg.take(Input.COMMITTED)
            case events.Admitted():
                return self._leg.take(Input.ADMITTED if self._spec.await_kv else Input.ADMITTED_LOCAL)
            case events.CaughtUp():
                return self._leg.caught_up(item.next_index)
            case events.Tokens():
                return self._leg.take(Input.TOKENS, first_index=item.run.first_index, ids=len(item.run.ids))
            case events.Paused():
                return self._leg.take(Input.PAUSED)
            case events.Stopped():
                return self._leg.take(Input.STOPPED)
            case events.Finished():
                return self._leg.take(Input.FINISHED)
            case events.Computed():
                return ()
            case events.Failed():
                raise item.error

    def _take_message(self, message: decode_pb2.DecodeRequest) -> tuple[Action, ...]:
        match message.WhichOneof("message"):
            case "extend" if message.extend.final:
                return self._take_ids(Input.EXTEND_FINAL, message.extend)
            case "extend":
                return self._take_ids(Input.EXTEND, message.extend)
            case "resume":
                return self._take_ids(Input.RESUME, message.resume)
            case "stop":
                return self._leg.take(Input.STOP)
            case "open":
                return self._leg.take(Input.OPEN)
            case _:
                raise InvalidRequest("message", "must be set")

    def _take_ids(self, what: Input, message: decode_pb2.Extend | decode_pb2.Resume) -> tuple[Action, ...]:
        actions = self._leg.take(what, first_index=message.first_index, ids=len(message.ids))
        if message.ids:
            self._core.metrics.extends.inc()
            self._core.metrics.extend_tokens.inc(len(message.ids))
        return actions

    async def _act(self, action: Action, item: Item) -> None:
        match action, item:
            case Action.EXPECT_KV, events.Admitted():
                self._expect_kv(item)
            case Action.COMMIT, _:
                self._handle.commit(self._prompt_blocks)
            case Action.EXTEND, decode_pb2.DecodeRequest():
                self._handle.extend(list(item.extend.ids), item.extend.first_index)
            case Action.RESUME, decode_pb2.DecodeRequest():
                self._handle.extend(list(item.resume.ids), item.resume.first_index, resume=True)
            case Action.STOP, _:
                self._handle.stop()
            case _:
                await self._write(self._event(action, item))

    def _expect_kv(self, admitted: events.Admitted) -> None:
        have = admitted.cached_tokens // self._block_tokens
        self._incoming = self._receiver.expect(self._transfer_id, admitted.block_ids, have)
        self._inbox.read(_commit(self._incoming))

    def _event(self, action: Action, item: Item) -> decode_pb2.DecodeEvent:
        match action, item:
            case Action.SEND_OPENED, events.Admitted():
                self._core.metrics.prompt_tokens.inc(len(self._spec.prompt_ids))
                self._core.metrics.hit_tokens.inc(item.cached_tokens)
                return reply.opened(item)
            case Action.SEND_READY, _:
                return reply.ready(self._committed.blocks_received if self._committed else 0)
            case Action.SEND_EXTENDED, _:
                return reply.extended(self._leg.next_index)
            case Action.SEND_TOKENS, events.Tokens():
                self._core.metrics.tokens.inc(len(item.run.ids))
                return reply.tokens(item, self._source)
            case Action.SEND_PAUSED, _:
                self._core.metrics.pauses.inc()
                return reply.paused(self._leg.next_index)
            case Action.SEND_STOPPED, _:
                return reply.stopped(self._leg.next_index)
            case Action.SEND_FINISHED, events.Finished():
                return reply.finished(item)
            case Action.SEND_DRAINED, _:
                return reply.drained(self._cached_now)
        raise AssertionError(f"{action} cannot follow {item!r}")

    @property
    def _block_tokens(self) -> int:
        return self._core.description.layout.block_tokens

    @property
    def _prompt_blocks(self) -> int:
        return len(self._spec.prompt_ids) // self._block_tokens

    @property
    def _cached_now(self) -> int:
        """Tokens of prompt and output that the cache holds once all ids but the last are computed."""
        computed = len(self._spec.prompt_ids) + self._leg.next_index - 1
        return computed // self._block_tokens * self._block_tokens if self._core.settings.prefix_cache else 0

    @property
    def _source(self) -> Source:
        return Source.RELAY if self._core.description.role is Role.RELAY else Source.MAIN


async def _commit(incoming: IncomingTransfer) -> AsyncIterator[Committed]:
    yield Committed(await incoming.committed())
