"""The fence: whose tokens count, and what each leg must be told next. Pure state and decisions; events: handoff.py.

One leg speaks at a time. A leg may speak once it was resumed with every id accepted so far, so the fence needs no
number of its own: it is `answer.count` at the moment of Resume.

    index   0      1 ............ k-1   k ..............
    sampled P      RLD                  MD              RLD tokens >= k are dropped and counted
            Resume(RLD, 0, [t0])        Resume(MD, known, ids[known:k]) and Stop(RLD), at the same moment
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.errors import KvrelayError, NoStage, Overloaded
from kvrelay.types import FinishReason, HandoffMode, Role, Source
from services.router.actions import (
    Action,
    AwaitToken,
    CloseLeg,
    Count,
    Fail,
    Feed,
    Mark,
    Replan,
    SendExtend,
    SendResume,
    SendStop,
)
from services.router.answer import Answer


@dataclass(frozen=True, slots=True)
class HandoffRules:
    """Thresholds of one request; see RouterSettings."""

    mode: HandoffMode = HandoffMode.DYNAMIC
    handoff_tokens: int = 8
    catch_up_tokens: int = 64
    handoff_rounds: int = 4
    hold_first: bool = False
    """Nothing is shown to the client before the decode stage has the KV (the baselines' way)."""


@dataclass(slots=True)
class Leg:
    """What the router knows of one decode leg."""

    number: int
    role: Role
    ready: bool = False
    known: int = 0
    """Output ids it was sent or has sampled: the next first_index it accepts."""
    extending: bool = False
    resumed: bool = False
    emitted: int = 0
    paused: bool = False


@dataclass(slots=True)
class HandoffReport:
    """How ids passed from relay to main."""

    mode: HandoffMode | None = None
    rounds: int = 0
    ids: int = 0
    relay_dropped: int = 0


@dataclass(slots=True)
class Fence:
    """Who speaks, who is to take over, and what was promised to whom."""

    answer: Answer
    rules: HandoffRules
    relay_busy: Callable[[], bool] = lambda: False
    """Has the relay a queue or few free slots, in a fresh report? Read at each decision."""
    relay: Leg | None = None
    main: Leg | None = None
    speaker: int | None = None
    shown: bool = False
    """May accepted tokens go to the client?"""
    report: HandoffReport = field(default_factory=HandoffReport)
    _fenced: set[int] = field(default_factory=set)
    """Relay legs behind the fence: they were told to stop, and nothing they say counts."""
    _turning: bool = False
    """Main decode's turn comes with the relay's next token."""
    _unfed: set[Role] = field(default_factory=set)
    _ended: bool = False
    _out: list[Action] = field(default_factory=list)

    def vacant(self, role: Role) -> bool:
        """Whether a Feed for this role is still wanted."""
        return not self.answer.finished and (self.relay if role is Role.RELAY else self.main) is None

    def knows(self, number: int) -> bool:
        """Whether the leg still matters: not closed, ended, or behind the fence."""
        return self._leg(number) is not None

    @property
    def over(self) -> bool:
        """No leg is left that has anything to do."""
        return self.relay is None and self.main is None

    @property
    def draining(self) -> bool:
        """The answer is complete and main decode is still taking it in."""
        return self.answer.finished and self.main is not None and self.main.number != self.speaker

    # --- decisions: they only note actions in _out -------------------------------------------------------------------

    def _choose_speaker(self) -> None:
        if self.main is not None and (self.main.ready or self.relay is None):
            self._relay_to(self.main)
        elif self.relay is not None:
            self._resume(self.relay)
        else:
            self._out.append(Feed(Role.MAIN, "no_leg"))

    def _turn_to(self, main: Leg) -> None:
        """Main decode can take over. Right after a token of the relay the user waits least for the next one."""
        relay = self.relay
        if relay is None or not relay.emitted or relay.paused or self._catch_up_first(self.answer.count - main.known):
            self._relay_to(main)
        elif not self._turning:
            self._turning = True
            self._out.append(AwaitToken(relay.number))

    def _relay_to(self, main: Leg) -> None:
        """Main decode takes over now, or catches up first."""
        self._turning = False
        relay = self.relay if self.relay is not None and self.relay.emitted else None
        outstanding = self.answer.count - main.known
        if relay is not None and self._catch_up_first(outstanding):
            self.report.mode = HandoffMode.CATCH_UP
            self.report.rounds += 1
            main.extending = True
            self._out.extend((SendExtend(main.number, main.known, self._ids_from(main)), Mark("extend")))
            main.known = self.answer.count
            return
        if relay is not None:
            self._out.extend((Mark("handoff"), SendStop(relay.number)))
            self._fenced.add(relay.number)
        elif self.relay is not None:
            self._out.extend((Count("relay_skipped"), CloseLeg(self.relay.number)))
        self.relay = None
        self._resume(main)

    def _catch_up_first(self, outstanding: int) -> bool:
        rules = self.rules
        if outstanding <= rules.handoff_tokens or self.report.rounds >= rules.handoff_rounds:
            return False
        if rules.mode is not HandoffMode.DYNAMIC:
            return rules.mode is HandoffMode.CATCH_UP
        started = self.report.rounds > 0
        return (started or outstanding > rules.catch_up_tokens) and not self.relay_busy()

    def _resume(self, leg: Leg) -> None:
        ids = self._ids_from(leg)
        if leg.role is Role.MAIN and self.answer.last_source is Source.RELAY:
            self.report.mode = self.report.mode or HandoffMode.ONE_SHOT
            self.report.ids = len(ids)
        self._out.append(SendResume(leg.number, leg.known, ids))
        leg.known, leg.resumed, leg.extending = self.answer.count, True, False
        self.speaker = leg.number
        self.shown = self.shown or leg.ready

    def _end(self) -> None:
        """The answer is complete. Whoever spoke ends by itself, unless only the router knows (a stop string)."""
        self.shown = self._ended = True
        self._out.append(Mark("answer_complete"))
        for leg in (self.relay, self.main):
            if leg is None:
                continue
            if leg is self.main and not leg.resumed:
                self._out.append(SendExtend(leg.number, leg.known, self._ids_from(leg), final=True))
                leg.known = self.answer.count
            elif leg.number != self.speaker or self.answer.reason is FinishReason.STOP_STRING:
                self._out.append(CloseLeg(leg.number))
                self._forget(leg)

    def _lose(self, leg: Leg, error: KvrelayError, why: str, *, replan: bool = True) -> None:
        self._forget(leg)
        self._out.append(CloseLeg(leg.number, failed=why in ("lost", "late", "violation")))
        if self.answer.finished:
            if leg.role is Role.MAIN and not leg.resumed:
                self._out.append(Count("drain_lost"))
            return
        self._out.append(Count(f"{leg.role}_{why}"))
        if self.answer.count == 0 and replan:
            self._out.append(Replan(error))
        elif leg.role is Role.RELAY and self.main is not None and self.main.ready:
            self._relay_to(self.main)
        else:
            whole = leg.role is Role.RELAY and self.main is None
            self._out.append(Feed(leg.role, f"{leg.role}_{why}", whole_answer=whole))

    def _feed_other(self, role: Role, error: KvrelayError) -> None:
        """No stage for this role, and no leg of the other one: try a leg of the other one, once."""
        other = Role.MAIN if role is Role.RELAY else Role.RELAY
        if other in self._unfed:
            self._out.append(Fail(error if isinstance(error, NoStage | Overloaded) else NoStage(str(error))))
        else:
            self._out.append(Feed(other, f"{role}_unavailable", whole_answer=other is Role.RELAY))

    # --- bookkeeping -------------------------------------------------------------------------------------------------

    def _attach(self, leg: Leg) -> None:
        if leg.role is Role.RELAY:
            self.relay = leg
        else:
            self.main = leg

    def _leg(self, number: int) -> Leg | None:
        if self.main is not None and self.main.number == number:
            return self.main
        return self.relay if self.relay is not None and self.relay.number == number else None

    def _forget(self, leg: Leg) -> None:
        self._turning = False
        if self.relay is leg:
            self.relay = None
        if self.main is leg:
            self.main = None
        if self.speaker == leg.number and not self.answer.finished:
            self.speaker = None

    def _ids_from(self, leg: Leg) -> tuple[int, ...]:
        return tuple(self.answer.ids[leg.known :])

    def _done(self) -> list[Action]:
        actions, self._out = self._out, []
        return actions
