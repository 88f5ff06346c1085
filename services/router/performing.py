"""What the hand-off wants done is done: actions become messages, timers, streams. Decides nothing itself."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.errors import InvalidRequest, KvrelayError, NoStage, Overloaded, Unsupported
from kvrelay.proto.v1 import decode_pb2
from kvrelay.telemetry.metrics import RouterMetrics
from kvrelay.types import Role
from services.router import actions
from services.router.feeding import Feeder
from services.router.handoff import Handoff
from services.router.legs import FeedDue, Legs, RelayLate, TurnDue, WaitedLongEnough
from services.router.report import Record
from services.router.route import StageView

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


@dataclass(slots=True, eq=False, kw_only=True)
class Performer:
    """Carries out one attempt's actions."""

    legs: Legs
    feeder: Feeder
    handoff: Handoff
    record: Record
    metrics: RouterMetrics
    patience: Patience
    failed: Callable[[StageView], None]
    """Told of each stage that has failed this request."""
    forgive: Callable[[StageView], None]
    """Told of a stage that was only full: it may be asked again."""
    fallback: Callable[[str], None]
    """Told of everything that did not go as planned."""
    _full: dict[Role, tuple[StageView, Overloaded]] = field(default_factory=dict)
    """Who has refused a leg for want of room, and was not asked again since."""
    _refusal: Overloaded | None = None
    """The last of them that there was no way around."""

    def _perform(self, todo: Sequence[actions.Action]) -> None:
        """Raises RouteBroke, or the KvrelayError that ends the request."""
        for action in todo:
            match action:
                case actions.Mark(name):
                    self.record.mark(name)
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
