"""A decode stage as the stage's own table describes it, with a stream that is known beforehand. For hand-off tests."""

from collections import deque
from dataclasses import dataclass, field

from kvrelay.stage.leg import Action, Input, Leg, State
from kvrelay.types import Role
from services.router.actions import SendExtend, SendResume, SendStop

REFERENCE_END = "finished"


@dataclass
class LegModel:
    """One leg at a stage. `reference` is what any stage samples, index by index; its end is the answer's end."""

    number: int
    role: Role
    reference: list[int]
    budget: int | None = None
    local: bool = False
    leg: Leg = field(default_factory=Leg)
    messages: deque[SendExtend | SendResume | SendStop] = field(default_factory=deque)
    events: deque[tuple[object, ...]] = field(default_factory=deque)
    admitted: bool = False
    kv_here: bool = False
    kv_pushed: bool = False
    dead: bool = False

    @property
    def next_index(self) -> int:
        return self.leg.next_index

    def take_message(self) -> None:
        """Handles the next message; raises ProtocolViolation as the stage would."""
        message = self.messages.popleft()
        if self.leg.ended:
            return
        if isinstance(message, SendStop):
            self._do(self.leg.take(Input.STOP))
            return
        end = message.first_index + len(message.ids)
        assert list(message.ids) == self.reference[message.first_index : end], "ids that nobody sampled"
        what = Input.RESUME
        if isinstance(message, SendExtend):
            what = Input.EXTEND_FINAL if message.final else Input.EXTEND
        else:
            assert end < len(self.reference), "a finished answer was resumed"
        self._do(self.leg.take(what, first_index=message.first_index, ids=len(message.ids)))

    def work(self, tokens: int = 1) -> bool:
        """Does the next thing that this stage can do by itself; False: it waits for others."""
        state = self.leg.state
        if self.leg.ended:
            return False
        if not self.admitted:
            self.admitted = True
            self._do(self.leg.take(Input.ADMITTED_LOCAL if self.local else Input.ADMITTED))
            self.kv_here = self.local
            return True
        if not self.kv_here:
            if not self.kv_pushed:
                return False
            self.kv_here = True
            self._do(self.leg.take(Input.COMMITTED))
            return True
        if state in (State.LOADED, State.PREPARING, State.EXTENDING, State.DRAINING, State.ARMED):
            self._do(self.leg.caught_up(self.next_index))
            return True
        if state is State.DECODING:
            return self._sample(tokens)
        if state is State.STOPPING:
            self._do(self.leg.take(Input.STOPPED))
            return True
        return False

    def _sample(self, tokens: int) -> bool:
        first = self.next_index
        end = min(first + tokens, len(self.reference), self.budget if self.budget is not None else len(self.reference))
        if end == first:
            self._do(self.leg.take(Input.PAUSED))
            return True
        self._do(self.leg.take(Input.TOKENS, ids=end - first), first)
        if end == len(self.reference):
            self._do(self.leg.take(Input.FINISHED))
        return True

    def _do(self, todo: tuple[Action, ...], first: int = 0) -> None:
        for action in todo:
            if action is Action.SEND_READY:
                self.events.append(("ready",))
            elif action is Action.SEND_EXTENDED:
                self.events.append(("extended", self.next_index))
            elif action is Action.SEND_TOKENS:
                self.events.append(("tokens", first, tuple(self.reference[first : self.next_index])))
            elif action is Action.SEND_PAUSED:
                self.events.append(("paused", self.next_index))
            elif action is Action.SEND_STOPPED:
                self.events.append(("stopped",))
            elif action is Action.SEND_FINISHED:
                self.events.append(("finished", self.next_index))
            elif action is Action.SEND_DRAINED:
                self.events.append(("drained",))
