"""The fence against stages that obey their own table, in every order that hypothesis can think of, with deaths."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvrelay.errors import NoStage, StageFailed
from kvrelay.types import FinishReason, HandoffMode, Pipeline, Role, Sampling, TokenRun
from services.router import actions
from services.router.answer import Answer
from services.router.fence import HandoffRules
from services.router.handoff import Handoff
from tests.unit.router.leg_model import LegModel

EOS = 999


class HandoffMachine(RuleBasedStateMachine):
    """Router logic on one side, leg models on the other; every message and event waits in a queue of its leg."""

    @initialize(
        pipeline=st.sampled_from(list(Pipeline)),
        length=st.integers(1, 24),
        eos=st.booleans(),
        mode=st.sampled_from(list(HandoffMode)),
        handoff_tokens=st.integers(1, 4),
        rounds=st.integers(0, 3),
        budget=st.integers(2, 24),
        hold=st.booleans(),
    )
    def start(
        self,
        pipeline: Pipeline,
        length: int,
        eos: bool,
        mode: HandoffMode,
        handoff_tokens: int,
        rounds: int,
        budget: int,
        hold: bool,
    ) -> None:
        self.reference = list(range(100, 100 + length))
        if eos:
            self.reference[-1] = EOS
        self.answer = Answer(Sampling(seed=0, max_tokens=length + (5 if eos else 0)), [EOS], None)
        rules = HandoffRules(mode, handoff_tokens, 2 * handoff_tokens, rounds, hold)
        self.busy = False
        self.handoff = Handoff(self.answer, rules, lambda: self.busy)
        self.legs: dict[int, LegModel] = {}
        self.budget = budget
        self.available = {Role.RELAY: 2, Role.MAIN: 2}
        self.prefill_alive = pipeline is not Pipeline.MD
        self.first_sent = False
        self.first_queue: list[TokenRun] = []
        self.ended: str | None = None
        self.waiting: actions.Wait | None = None
        self.turn: int | None = None
        self.pipeline = pipeline
        roles = {
            Pipeline.P_RLD_MD: [Role.RELAY, Role.MAIN],
            Pipeline.P_MD: [Role.MAIN],
            Pipeline.P_RLD: [Role.RELAY],
            Pipeline.MD: [Role.MAIN],
        }[pipeline]
        local = pipeline is Pipeline.MD
        opened = [self._open(role, whole=pipeline is Pipeline.P_RLD, local=local) for role in roles]
        self._perform(self.handoff.open([(leg.number, leg.role) for leg in opened], local_prefill=local))

    # --- what may happen ---------------------------------------------------------------------------------------------

    @rule()
    def prefill_samples(self) -> None:
        if self.prefill_alive and not self.first_sent:
            self.first_sent = True
            self._perform(self.handoff.first_token(TokenRun(0, (self.reference[0],))))
            if len(self.reference) == 1 and self.ended is None:
                reason = FinishReason.EOS if self.reference[0] == EOS else FinishReason.LENGTH
                self._perform(self.handoff.prefill_finished(reason, 1))

    @rule(data=st.data())
    def kv_arrives(self, data: st.DataObject) -> None:
        self._pick(data, lambda leg: not leg.local, "kv").kv_pushed = True

    @rule(data=st.data())
    def stage_takes_a_message(self, data: st.DataObject) -> None:
        leg = self._pick(data, lambda leg: bool(leg.messages), "message")
        if leg.messages:
            leg.take_message()

    @rule(data=st.data(), tokens=st.integers(1, 5))
    def stage_works(self, data: st.DataObject, tokens: int) -> None:
        self._pick(data, lambda leg: not leg.leg.ended, "work").work(tokens)

    @rule(data=st.data(), most=st.integers(1, 4))
    def router_hears(self, data: st.DataObject, most: int) -> None:
        leg = self._pick(data, lambda leg: bool(leg.events), "event")
        for _ in range(min(most, len(leg.events))):
            self._hear(leg)

    @rule(busy=st.booleans())
    def relay_load_changes(self, busy: bool) -> None:
        self.busy = busy

    @precondition(lambda self: self.answer.count > 0)
    @rule(data=st.data())
    def leg_dies(self, data: st.DataObject) -> None:
        leg = self._pick(data, lambda leg: not leg.dead, "dies")
        if not leg.dead and not leg.leg.ended and data.draw(st.integers(0, 3)) == 0:
            leg.dead = True
            leg.events.clear()
            self._perform(self.handoff.leg_lost(leg.number, StageFailed("died")))

    @precondition(lambda self: self.answer.count > 0)
    @rule(data=st.data())
    def push_fails(self, data: st.DataObject) -> None:
        leg = self._pick(data, lambda leg: not leg.kv_pushed and not leg.local, "push")
        if not leg.kv_pushed and not leg.local and not leg.dead:
            self._perform(self.handoff.kv_lost(leg.number, StageFailed("push failed")))

    @precondition(lambda self: self.answer.count > 0 and self.prefill_alive)
    @rule()
    def prefill_dies(self) -> None:
        self.prefill_alive = False
        self._perform(self.handoff.prefill_lost(list(self.legs), StageFailed("P died")))

    @rule()
    def relay_is_late(self) -> None:
        if self.handoff.relay is not None:
            self._perform(self.handoff.relay_late(self.handoff.relay.number))

    @rule()
    def turn_is_due(self) -> None:
        if self.turn is not None:
            self._perform(self.handoff.turn_due(self.turn))

    @rule()
    def stage_joins(self) -> None:
        self.available[Role.MAIN] += 1
        self._perform(self.handoff.stage_joined())

    # --- what must hold ----------------------------------------------------------------------------------------------

    @invariant()
    def the_answer_is_a_prefix_of_the_reference(self) -> None:
        if hasattr(self, "answer"):
            assert self.answer.ids == self.reference[: self.answer.count]
            assert sum(self.answer.by_source.values()) == self.answer.count

    def teardown(self) -> None:
        """From here on nothing fails: the answer must become complete, and every leg must end."""
        if not hasattr(self, "answer"):
            return
        for _ in range(400):
            if self.ended is not None or (self.answer.finished and self.handoff.over):
                break
            moved = self.waiting is not None
            if self.waiting is not None:
                self._perform(self.handoff.gave_up(self.waiting.error))
                self.waiting = None
            if self.turn is not None:
                due, self.turn = self.turn, None
                self._perform(self.handoff.turn_due(due))
                moved = True
            if not self.first_sent and self.prefill_alive:
                self.prefill_samples()
                moved = True
            for leg in list(self.legs.values()):
                leg.kv_pushed = True
                while leg.messages:
                    leg.take_message()
                    moved = True
                moved |= leg.work()
                while leg.events and leg.number in self.legs:
                    self._hear(leg)
                    moved = True
            assert moved or self.ended is not None or (self.answer.finished and self.handoff.over), "stuck"
        if self.ended is None:
            assert self.answer.finished
            assert self.answer.ids == self.reference
            assert self.handoff.over
            assert self.handoff.shown

    # --- machinery ---------------------------------------------------------------------------------------------------

    def _pick(self, data: st.DataObject, wanted: object, name: str) -> LegModel:
        legs = [leg for leg in self.legs.values() if not leg.dead and wanted(leg)]  # type: ignore[operator]
        if not legs:
            return LegModel(0, Role.MAIN, self.reference, dead=True, kv_pushed=True)
        return data.draw(st.sampled_from(legs), label=name)

    def _open(self, role: Role, *, whole: bool, local: bool = False) -> LegModel:
        number = len(self.legs) + 1
        while number in self.legs:
            number += 1
        self._next = max(getattr(self, "_next", 0) + 1, number)
        leg = LegModel(self._next, role, self.reference, local=local)
        if role is Role.RELAY and not whole:
            leg.budget = self.budget
        self.legs[leg.number] = leg
        return leg

    def _hear(self, leg: LegModel) -> None:
        name, *values = leg.events.popleft()
        handoff, number = self.handoff, leg.number
        if name == "ready":
            self._perform(handoff.ready(number))
        elif name == "extended":
            self._perform(handoff.extended(number, int(str(values[0]))))
        elif name == "tokens":
            self._perform(handoff.tokens(number, TokenRun(*values)))  # type: ignore[arg-type]
        elif name == "paused":
            self._perform(handoff.paused(number))
        elif name == "stopped":
            self._perform(handoff.stopped(number))
        elif name == "finished":
            reason = FinishReason.EOS if self.reference[-1] == EOS else FinishReason.LENGTH
            self._perform(handoff.finished(number, reason, int(str(values[0]))))
        elif name == "drained":
            self._perform(handoff.drained(number))

    def _perform(self, todo: list[actions.Action]) -> None:
        for action in todo:
            if isinstance(action, actions.SendExtend | actions.SendResume | actions.SendStop):
                assert action.leg in self.legs, "a message to a closed leg"
                self.legs[action.leg].messages.append(action)
            elif isinstance(action, actions.CloseLeg):
                self.legs.pop(action.leg, None)
            elif isinstance(action, actions.Feed):
                self._feed(action)
            elif isinstance(action, actions.Wait):
                self.waiting = action
            elif isinstance(action, actions.AwaitToken):
                self.turn = action.leg
            elif isinstance(action, actions.Replan | actions.Fail):
                self.ended = str(action)
                assert isinstance(action, actions.Fail) or self.answer.count == 0

    def _feed(self, action: actions.Feed) -> None:
        if not self.handoff.vacant(action.role):
            return
        if self.available[action.role] == 0:
            self._perform(self.handoff.unfed(action.role, NoStage(str(action.role))))
            return
        self.available[action.role] -= 1
        leg = self._open(action.role, whole=action.whole_answer)
        self._perform(self.handoff.fed(action.role, leg.number))


HandoffMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)
TestHandoff = HandoffMachine.TestCase
