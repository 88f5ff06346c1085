"""Between the legs and the hand-off: what a leg says becomes an event, at once and in order. Decides nothing itself."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.errors import InvalidRequest, Overloaded, StageFailed
from kvrelay.proto.v1 import decode_pb2, prefill_pb2
from kvrelay.rpc.convert import finish_reason_from_proto, token_run_from_proto
from kvrelay.types import Role
from services.router import actions
from services.router.answer import Answer
from services.router.client import ClientStream
from services.router.drain import must_cut
from services.router.legs import (
    Ended,
    Event,
    FeedDue,
    FleetChanged,
    FromDecode,
    FromPrefill,
    RelayLate,
    TurnDue,
    WaitedLongEnough,
)
from services.router.performing import Performer, RouteBroke
from services.router.pushes import Pushes
from services.router.route import Route

log = logging.getLogger(__name__)


def _idle() -> bool:
    return False


@dataclass(slots=True, eq=False, kw_only=True)
class Conductor(Performer):
    """One attempt at one request: its legs, who feeds them, who speaks.

    Legs hand over what they read where they read it, so that a token costs one wake-up, the client's: nothing here
    waits but for the end of something.
    """

    route: Route
    pushes: Pushes
    answer: Answer
    client: ClientStream
    fleet_changed: Callable[[], None]
    """Told when a stage has joined or left."""
    cut: bool = False
    """The singular rule has cut the push to main decode."""
    _lost: bool = False
    _error: Exception | None = None
    """What an event has led to; nothing is heard after it."""
    _parting: bool = False
    """Someone waits for the legs' end."""

    def __post_init__(self) -> None:
        self.legs.listen(self._hear)

    def open(self) -> None:
        """Opens all legs of the route; waits for none. Raises RouteBroke if a stage has just left."""
        try:
            legs = self.feeder.open(self.route)
        except StageFailed as error:
            raise RouteBroke(error) from error
        self._perform(self.handoff.open(legs, local_prefill=self.route.prefill is None))

    async def until_answered(self) -> None:
        """Writes to the client until the answer is complete. Raises RouteBroke, or the KvrelayError that ends it."""
        answer, client = self.answer, self.client
        while answer.reason is None:
            await client.flush()
            await client.bell.rung()
            if self._error is not None:
                raise self._error
        self.cut_if_singular()

    async def settle(self) -> None:
        """Returns once no leg has anything to do."""
        await self._part(lambda: self.handoff.over)

    async def drain(self) -> str:
        """As settle, for main decode without a client; -> "drained", "lost" or "cut"."""
        await self._part(lambda: self.handoff.over or self.cut_if_singular())
        if self.cut:
            return "cut"
        return "lost" if self._lost else "drained"

    async def aclose(self) -> None:
        """Closes all legs."""
        await self.legs.aclose()
        self.handoff.relay_busy = _idle  # it knows this conductor

    def cut_if_singular(self) -> bool:
        """The reactive singular rule: a rest that needs too much of the link will not cross; -> whether it was cut."""
        main = self.handoff.main
        if self.cut or main is None or main.ready or not self.handoff.draining:
            return self.cut
        rest = self.pushes.rest(main.number)
        if rest is None or not must_cut(rest.bytes, rest.rate_bytes_per_s, self.patience.singular_cut_s):
            return False
        log.info("singular: %d bytes will not cross to leg %d", rest.bytes, main.number)
        self.cut = True
        self.fallback("singular_cut")
        self.metrics.singular.labels("cut").inc()
        self.metrics.singular_saved_bytes.inc(rest.bytes)
        return True

    async def _part(self, over: Callable[[], bool]) -> None:
        self._parting = True
        while not over():
            await self._news()

    async def _news(self) -> None:
        """Returns once there is something to do. Raises what an event has led to."""
        await self.client.bell.rung()
        if self._error is not None:
            raise self._error

    def _hear(self, event: Event) -> asyncio.Event | None:
        """One event, at once: nothing is awaited, so each is over before the next. -> what to wait for before more."""
        if self._error is not None:
            return None
        answer, client = self.answer, self.client
        before = len(answer.ids)
        try:
            todo = self._on(event)
            grown = len(answer.ids) - before
            if grown or client.shown is not self.handoff.shown:
                self._show()  # first of all: the client waits for nothing of what follows
            if grown:
                self._accepted(grown)
            if todo:
                self._perform(todo)
                if client.shown is not self.handoff.shown:
                    self._show()
        except Exception as error:  # it is the request's, not that of the task that happened to read the message
            self._error = error
            self.legs.close_all()  # no stage works on while the request's task is still writing to a slow client
        if self._parting or self._error is not None or answer.reason is not None:
            client.wake()
            return None
        return client.full

    def _show(self) -> None:
        """Wakes the client's writer: there is more, or it may write."""
        self.client.shown = self.handoff.shown
        self.client.wake()

    def _accepted(self, tokens: int) -> None:
        source = self.answer.last_source
        assert source is not None
        gap = self.record.tokens(source)
        self.metrics.accepted(source, tokens, gap)
        if gap is None:
            self.metrics.first_token(self.route.pipeline, self.record.ttft_s or 0.0)

    # --- events ------------------------------------------------------------------------------------------------------

    def _on(self, event: Event) -> Sequence[actions.Action]:
        if isinstance(event, (FromDecode, FromPrefill)):  # a union is twice as slow
            try:
                if isinstance(event, FromDecode):
                    return self._from_decode(event.number, event.event)
                return self._from_prefill(event.number, event.event)
            except InvalidRequest as error:  # a message that makes no sense is the stage's fault, never the client's
                self.legs.close(event.number)
                event = Ended(event.number, StageFailed(f"a stage sent nonsense: {error}"))
        if isinstance(event, Ended):
            return self._ended(event)
        if isinstance(event, RelayLate):
            return self.handoff.relay_late(event.leg)
        if isinstance(event, TurnDue):
            return self.handoff.turn_due(event.leg)
        if isinstance(event, WaitedLongEnough):
            return self.handoff.gave_up(event.error)
        if isinstance(event, FeedDue):
            return [actions.Feed(event.role, event.why, event.whole_answer)]
        assert isinstance(event, FleetChanged)
        self.fleet_changed()
        return self.handoff.stage_joined() if self.feeder.could_feed(Role.MAIN) else []

    def _from_decode(self, leg: int, event: decode_pb2.DecodeEvent) -> Sequence[actions.Action]:
        kind = event.WhichOneof("event")
        if kind == "tokens":
            return self.handoff.tokens(leg, token_run_from_proto(event.tokens))
        if kind == "opened":
            self.record.measured(self.feeder.decode[leg].stage.description.role, event.opened.cached_tokens)
            return []
        if kind == "ready":
            return self.handoff.ready(leg)
        if kind == "extended":
            return self.handoff.extended(leg, event.extended.next_index)
        if kind == "paused":
            return self.handoff.paused(leg)
        if kind == "stopped":
            return self.handoff.stopped(leg)
        if kind == "finished":
            reason = finish_reason_from_proto(event.finished.reason)
            return self.handoff.finished(leg, reason, event.finished.completion_tokens)
        if kind == "drained":
            return self.handoff.drained(leg)
        raise InvalidRequest("event", "is empty")

    def _from_prefill(self, stream: int, event: prefill_pb2.PrefillEvent) -> Sequence[actions.Action]:
        kind = event.WhichOneof("event")
        if kind == "started":
            self.record.measured(Role.PREFILL, event.started.cached_tokens)
            self.record.first("prefill_started")
        elif kind == "first_token":
            return self.handoff.first_token(token_run_from_proto(event.first_token))
        elif kind == "finished":
            reason = finish_reason_from_proto(event.finished.reason)
            return self.handoff.prefill_finished(reason, event.finished.completion_tokens)
        elif kind == "push_progress":
            self.pushes.progress(event.push_progress)
        elif kind == "push_ended":
            lost = self.pushes.ended(event.push_ended)
            return [] if lost is None else self.handoff.kv_lost(*lost)
        return []

    def _ended(self, event: Ended) -> Sequence[actions.Action]:
        leg = self.feeder.decode.get(event.number)
        if leg is not None:
            error = event.error or StageFailed(f"{leg.stage.instance_id} ended its stream without a word")
            if self.handoff.knows(event.number):
                log.info("leg at %s is lost: %s", leg.stage.instance_id, error)
                self._lost = True
            if isinstance(error, Overloaded):
                self._full[leg.stage.description.role] = leg.stage, error
            return self.handoff.leg_lost(event.number, error)
        stage = self.feeder.prefill[event.number]
        if event.error is None and self.answer.count:
            return []
        error = event.error or StageFailed(f"{stage.instance_id} ended its stream without a token")
        log.info("prefill at %s is lost: %s", stage.instance_id, error)
        self.failed(stage)
        if not self.answer.count:
            return [actions.Count("prefill_lost"), *self.handoff.prefill_lost((), error)]
        return self.handoff.prefill_lost(self.feeder.fed_by[event.number], error)
