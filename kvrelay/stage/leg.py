"""The life of a decode leg as one table: (state, input) -> next state and actions. Knows no gRPC, engine or I/O."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.errors import ProtocolViolation


class State(enum.StrEnum):
    """Where a leg is."""

    QUEUED = "QUEUED"
    """Opened by the router; no KV room yet."""
    LOADING = "LOADING"
    """KV room is reserved; the KV is on its way."""
    LOADED = "LOADED"
    """The KV is here; what is missing of the prompt is being computed."""
    PREPARING = "PREPARING"
    """As LOADED, but no KV comes from outside: all that is missing of the prompt is being computed."""
    READY = "READY"
    """KV is here; held until the router resumes."""
    EXTENDING = "EXTENDING"
    """One Extend is being computed; held."""
    ARMED_QUEUED = "ARMED_QUEUED"
    """As QUEUED; Resume has come."""
    ARMED = "ARMED"
    """As LOADING or PREPARING; Resume has come: sampling follows the KV by itself."""
    DECODING = "DECODING"
    """Resumed and the KV is here."""
    PAUSED = "PAUSED"
    """The output budget is used up."""
    STOPPING = "STOPPING"
    """Stop has come while decoding; the engine has not answered yet."""
    DRAINING = "DRAINING"
    """The answer is complete elsewhere; only the cache is still to be filled."""
    FINISHED = "FINISHED"
    STOPPED = "STOPPED"
    DRAINED = "DRAINED"


TERMINAL = frozenset({State.FINISHED, State.STOPPED, State.DRAINED})
"""After these the stage has released everything and ends the stream OK."""


class Input(enum.StrEnum):
    """What can happen to a leg."""

    OPEN = "OpenLeg"
    EXTEND = "Extend"
    EXTEND_FINAL = "Extend{final}"
    RESUME = "Resume"
    STOP = "Stop"

    ADMITTED = "admitted"
    """The engine has reserved KV room; the KV will be pushed."""
    ADMITTED_LOCAL = "admitted, local prefill"
    COMMITTED = "committed"
    """All pushed blocks are here."""
    CAUGHT_UP = "caught up"
    """The engine has computed all known ids but the last."""
    CAUGHT_UP_EARLY = "caught up, early"
    """The same, from before the ids of the last message."""
    TOKENS = "tokens"
    PAUSED = "paused"
    STOPPED = "stopped"
    FINISHED = "finished"


MESSAGES = frozenset({Input.OPEN, Input.EXTEND, Input.EXTEND_FINAL, Input.RESUME, Input.STOP})
"""From the router: one that the table lacks is the router's mistake. All other inputs come from inside the stage."""


class Action(enum.StrEnum):
    """What the stage does, in the order the table gives."""

    EXPECT_KV = "take the pushed KV in"
    COMMIT = "tell the engine that the KV is here"
    EXTEND = "give the engine the ids; stay held"
    RESUME = "give the engine the ids and let it sample"
    STOP = "tell the engine to stop"
    SEND_OPENED = "send Opened"
    SEND_READY = "send Ready"
    SEND_EXTENDED = "send Extended"
    SEND_TOKENS = "send TokenChunk"
    SEND_PAUSED = "send Paused"
    SEND_STOPPED = "send Stopped"
    SEND_FINISHED = "send Finished"
    SEND_DRAINED = "send Drained"


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of the table."""

    state: State
    actions: tuple[Action, ...] = ()


def _table() -> dict[tuple[State, Input], Step]:
    s, i, a = State, Input, Action
    return {
        (s.QUEUED, i.ADMITTED): Step(s.LOADING, (a.SEND_OPENED, a.EXPECT_KV)),
        (s.QUEUED, i.ADMITTED_LOCAL): Step(s.PREPARING, (a.SEND_OPENED,)),
        (s.QUEUED, i.EXTEND_FINAL): Step(s.DRAINING, (a.EXTEND,)),
        (s.QUEUED, i.RESUME): Step(s.ARMED_QUEUED, (a.RESUME,)),
        (s.QUEUED, i.STOP): Step(s.STOPPED, (a.SEND_STOPPED,)),
        #
        (s.LOADING, i.COMMITTED): Step(s.LOADED, (a.COMMIT,)),
        (s.LOADING, i.EXTEND_FINAL): Step(s.DRAINING, (a.EXTEND,)),
        (s.LOADING, i.RESUME): Step(s.ARMED, (a.RESUME,)),
        (s.LOADING, i.STOP): Step(s.STOPPED, (a.SEND_STOPPED,)),
        #
        (s.LOADED, i.CAUGHT_UP): Step(s.READY, (a.SEND_READY,)),
        (s.LOADED, i.EXTEND_FINAL): Step(s.DRAINING, (a.EXTEND,)),
        (s.LOADED, i.RESUME): Step(s.DECODING, (a.RESUME, a.SEND_READY)),
        (s.LOADED, i.STOP): Step(s.STOPPED, (a.SEND_STOPPED,)),
        #
        (s.PREPARING, i.CAUGHT_UP): Step(s.READY, (a.SEND_READY,)),
        (s.PREPARING, i.EXTEND_FINAL): Step(s.DRAINING, (a.EXTEND,)),
        (s.PREPARING, i.RESUME): Step(s.ARMED, (a.RESUME,)),
        (s.PREPARING, i.STOP): Step(s.STOPPED, (a.SEND_STOPPED,)),
        #
        (s.READY, i.EXTEND): Step(s.EXTENDING, (a.EXTEND,)),
        (s.READY, i.EXTEND_FINAL): Step(s.DRAINING, (a.EXTEND,)),
        (s.READY, i.RESUME): Step(s.DECODING, (a.RESUME,)),
        (s.READY, i.STOP): Step(s.STOPPED, (a.SEND_STOPPED,)),
        #
        (s.EXTENDING, i.CAUGHT_UP): Step(s.READY, (a.SEND_EXTENDED,)),
        (s.EXTENDING, i.EXTEND_FINAL): Step(s.DRAINING, (a.EXTEND,)),
        (s.EXTENDING, i.RESUME): Step(s.DECODING, (a.RESUME,)),
        (s.EXTENDING, i.STOP): Step(s.STOPPED, (a.SEND_STOPPED,)),
        #
        (s.ARMED_QUEUED, i.ADMITTED): Step(s.ARMED, (a.SEND_OPENED, a.EXPECT_KV)),
        (s.ARMED_QUEUED, i.ADMITTED_LOCAL): Step(s.ARMED, (a.SEND_OPENED,)),
        (s.ARMED_QUEUED, i.STOP): Step(s.STOPPED, (a.SEND_STOPPED,)),
        #
        # Whatever comes first proves that the KV is here: Ready goes out before it.
        (s.ARMED, i.COMMITTED): Step(s.DECODING, (a.COMMIT, a.SEND_READY)),
        (s.ARMED, i.CAUGHT_UP): Step(s.DECODING, (a.SEND_READY,)),
        (s.ARMED, i.CAUGHT_UP_EARLY): Step(s.DECODING, (a.SEND_READY,)),
        (s.ARMED, i.TOKENS): Step(s.DECODING, (a.SEND_READY, a.SEND_TOKENS)),
        (s.ARMED, i.PAUSED): Step(s.PAUSED, (a.SEND_READY, a.SEND_PAUSED)),
        (s.ARMED, i.FINISHED): Step(s.FINISHED, (a.SEND_READY, a.SEND_FINISHED)),
        (s.ARMED, i.STOP): Step(s.STOPPED, (a.SEND_STOPPED,)),
        #
        # A CaughtUp that was under way when Resume came says nothing new.
        (s.DECODING, i.CAUGHT_UP): Step(s.DECODING),
        (s.DECODING, i.CAUGHT_UP_EARLY): Step(s.DECODING),
        (s.DECODING, i.TOKENS): Step(s.DECODING, (a.SEND_TOKENS,)),
        (s.DECODING, i.PAUSED): Step(s.PAUSED, (a.SEND_PAUSED,)),
        (s.DECODING, i.FINISHED): Step(s.FINISHED, (a.SEND_FINISHED,)),
        (s.DECODING, i.STOP): Step(s.STOPPING, (a.STOP,)),
        #
        (s.PAUSED, i.STOP): Step(s.STOPPED, (a.SEND_STOPPED,)),
        #
        # What the engine did before it saw the stop still goes out, and Finished is a valid answer to Stop.
        (s.STOPPING, i.CAUGHT_UP): Step(s.STOPPING),
        (s.STOPPING, i.CAUGHT_UP_EARLY): Step(s.STOPPING),
        (s.STOPPING, i.TOKENS): Step(s.STOPPING, (a.SEND_TOKENS,)),
        (s.STOPPING, i.PAUSED): Step(s.STOPPING),
        (s.STOPPING, i.STOPPED): Step(s.STOPPED, (a.SEND_STOPPED,)),
        (s.STOPPING, i.FINISHED): Step(s.FINISHED, (a.SEND_FINISHED,)),
        (s.STOPPING, i.STOP): Step(s.STOPPING),
        #
        (s.DRAINING, i.ADMITTED): Step(s.DRAINING, (a.SEND_OPENED, a.EXPECT_KV)),
        (s.DRAINING, i.ADMITTED_LOCAL): Step(s.DRAINING, (a.SEND_OPENED,)),
        (s.DRAINING, i.COMMITTED): Step(s.DRAINING, (a.COMMIT,)),
        (s.DRAINING, i.CAUGHT_UP): Step(s.DRAINED, (a.SEND_DRAINED,)),
        (s.DRAINING, i.CAUGHT_UP_EARLY): Step(s.DRAINING),
        (s.DRAINING, i.STOP): Step(s.STOPPED, (a.SEND_STOPPED,)),
    }


TABLE: Mapping[tuple[State, Input], Step] = _table()
"""All that may happen. A message that is not here is refused; an event that is not here is a bug of the stage."""


class Leg:
    """One leg's state and its next known output index; pure."""

    def __init__(self) -> None:
        self.state = State.QUEUED
        self.next_index = 0
        """Output index behind all ids that the leg was given or has sent, computed or not."""

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    def take(self, what: Input, *, first_index: int | None = None, ids: int = 0) -> tuple[Action, ...]:
        """Moves on by one input; first_index and the number of ids where the input carries ids.

        Raises ProtocolViolation, and changes nothing, if the router sent what the state does not allow, or ids that do
        not start at the next known index; AssertionError if the stage itself broke the table.
        """
        step = TABLE.get((self.state, what))
        if step is None and what in MESSAGES:
            raise ProtocolViolation(f"{what} is not allowed while the leg is {self.state}")
        assert step is not None, f"{what} while the leg is {self.state}"
        if first_index is not None and first_index != self.next_index:
            raise ProtocolViolation(f"{what}: first_index {first_index}, but the leg's next index is {self.next_index}")
        self.state = step.state
        self.next_index += ids
        return step.actions

    def caught_up(self, next_index: int) -> tuple[Action, ...]:
        """The engine has computed all ids before output index `next_index` but the last."""
        return self.take(Input.CAUGHT_UP if next_index == self.next_index else Input.CAUGHT_UP_EARLY)
