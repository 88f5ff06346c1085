"""Between the legs and the hand-off: messages become events, actions become messages. Decides nothing itself."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.errors import InvalidRequest, KvrelayError, NoStage, Overloaded, StageFailed, Unsupported
from kvrelay.proto.v1 import decode_pb2, prefill_pb2
from kvrelay.rpc.convert import finish_reason_from_proto, token_run_from_proto
from kvrelay.telemetry.metrics import RouterMetrics
from kvrelay.types import Role
from services.router import actions
from services.router.answer import Answer
from services.router.client import ClientStream
from services.router.drain import must_cut
from services.router.feeding import Feeder
from services.router.handoff import Handoff
from services.router.legs import (
    Ended,
    Event,
    FeedDue,
    FleetChanged,
    FromDecode,
    FromPrefill,
    Legs,
    RelayLate,
    TurnDue,
    WaitedLongEnough,
)
from services.router.pushes import Pushes
from services.router.report import Record
from services.router.route import Route, StageView

log = logging.getLogger(__name__)


class RouteBroke(Exception):
    """No token has been accepted: the request may be planned again."""

    def __init__(self, error: KvrelayError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class Patience:
    """Times of RouterSettings that a request in progress needs."""

    relay_ready_s: float
    rejoin_wait_s: float
    stop_grace_s: float
    singular_cut_s: float
    turn_wait_s: float


@dataclass(slots=True, eq=False)
class Conductor:
    """One attempt at one request: its legs, who feeds them, who speaks."""

    route: Route
    legs: Legs
    feeder: Feeder
    pushes: Pushes
    handoff: Handoff
    answer: Answer
    client: ClientStream
    record: Record
    metrics: RouterMetrics
    patience: Patience
    failed: Callable[[StageView], None]
    """Told of each stage that has failed this request."""
    forgive: Callable[[StageView], None]
    """Told of a stage that was only full: it may be asked again."""
    fleet_changed: Callable[[], None]
    """Told when a stage has joined or left."""
    fallback: Callable[[str], None]
    """Told of everything that did not go as planned."""
    cut: bool = False
    """The singular rule has cut the push to main decode."""
    _full: dict[Role, tuple[StageView, Overloaded]] = field(default_factory=dict)
    """Who has refused a leg for want of room, and was not asked again since."""
    _refusal: Overloaded | None = None
    """The last of them that there was no way around."""
    _lost: bool = False

    def open(self) -> None:
        """Opens all legs of the route; waits for none. Raises RouteBroke if a stage has just left."""
        try:
            legs = self.feeder.open(self.route)
        except StageFailed as error:
            raise RouteBroke(error) from error
        self._perform(self.handoff.open(legs, local_prefill=self.route.prefill is None))

    async def until_answered(self) -> None:
        """Returns once the answer is complete. Raises RouteBroke, or the KvrelayError that ends the request."""
        while not self.answer.finished:
            await self.client.room()
            await self._step()
        self.cut_if_singular()

    async def settle(self) -> None:
        """Returns once no leg has anything to do."""
        while not self.handoff.over:
            await self._step()

    async def drain(self) -> str:
        """As settle, for main decode without a client; -> "drained", "lost" or "cut"."""
        while not self.handoff.over:
            if self.cut_if_singular():
                return "cut"
            await self._step()
        return "lost" if self._lost else "drained"

    async def aclose(self) -> None:
        """Closes all legs."""
        await self.legs.aclose()

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

    async def _step(self) -> None:
        event = await self.legs.next()
        before = self.answer.count
        todo = self._on(event)
        self._show(self.answer.count > before)  # first of all: the client waits for nothing of what follows
        if self.answer.count > before:
            self._accepted(self.answer.count - before)
        if todo:
            self._perform(todo)
            self._show(False)

    def _show(self, grown: bool) -> None:
        """Wakes the client's writer if there is more that it may write."""
        if grown or self.client.shown != self.handoff.shown:
            self.client.shown = self.handoff.shown
            self.client.wake()

    def _accepted(self, tokens: int) -> None:
        source = self.answer.last_source
        assert source is not None
        gap = self.record.tokens(source)
        self.metrics.accepted(source, tokens, gap)
        if gap is None:
            self.metrics.ttft.labels(self.route.pipeline).observe(self.record.ttft_s or 0.0)

    # --- events ------------------------------------------------------------------------------------------------------

    def _on(self, event: Event) -> Sequence[actions.Action]:
        if isinstance(event, FromDecode | FromPrefill):
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

    # --- actions -----------------------------------------------------------------------------------------------------

    def _perform(self, todo: Sequence[actions.Action]) -> None:
        for action in todo:
            match action:
                case actions.SendResume(leg, first_index, ids):
                    resume = decode_pb2.Resume(first_index=first_index, ids=ids)
                    self.legs.send(leg, decode_pb2.DecodeRequest(resume=resume))
                    if self.feeder.decode[leg].stage.description.role is Role.RELAY:
                        self.legs.later(self.patience.relay_ready_s, RelayLate(leg))
                case actions.SendExtend(leg, first_index, ids, final):
                    extend = decode_pb2.Extend(first_index=first_index, ids=ids, final=final)
                    self.legs.send(leg, decode_pb2.DecodeRequest(extend=extend))
                case actions.SendStop(leg):
                    self.legs.send(leg, decode_pb2.DecodeRequest(stop=decode_pb2.Stop()))
                    self.legs.close_after(leg, self.patience.stop_grace_s)
                case actions.CloseLeg(leg, failed):
                    self.legs.close(leg)
                    if failed:
                        self.failed(self.feeder.decode[leg].stage)
                case actions.Feed(role, why, whole):
                    self._feed(role, why, whole)
                case actions.Count(reason):
                    self._count(reason)
                case actions.Mark(name):
                    self.record.mark(name)
                case actions.AwaitToken(leg):
                    self.legs.later(self.patience.turn_wait_s, TurnDue(leg))
                case actions.Replan(error):
                    if isinstance(error, InvalidRequest | Unsupported):
                        raise error
                    raise RouteBroke(error)
                case actions.Wait(error):
                    self.legs.later(self.patience.rejoin_wait_s, WaitedLongEnough(error))
                case actions.Fail(error):
                    raise error

    def _feed(self, role: Role, why: str, whole: bool) -> None:
        if not self.handoff.vacant(role):
            return
        local_before = self.feeder.local_prefills
        try:
            number = self.feeder.feed(role, whole=whole)
        except NoStage as error:
            log.info("no leg for %s (%s): %s", role, why, error)
            if role in self._full:
                self._feed_later(role, why, whole)
            else:
                self._perform(self.handoff.unfed(role, self._refusal or error))
            return
        if self.feeder.local_prefills > local_before:
            self._count("local_prefill")
        self._count(f"fed_{role}_again")
        self._perform(self.handoff.fed(role, number))

    def _feed_later(self, role: Role, why: str, whole: bool) -> None:
        """No other stage has room: whoever was full is asked again after the time it gave."""
        stage, self._refusal = self._full.pop(role)
        self.forgive(stage)
        self._count(f"{role}_full")
        self.legs.later(self._refusal.retry_after_s, FeedDue(role, why, whole))

    def _count(self, reason: str) -> None:
        self.fallback(reason)
        if reason == "relay_skipped":
            self.metrics.relay_skipped.inc()
        elif reason == "relay_paused":
            self.metrics.relay_paused.inc()
