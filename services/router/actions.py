"""What the hand-off logic wants done: plain values. Knows no gRPC; pipeline.py carries them out."""

from dataclasses import dataclass

from kvrelay.errors import KvrelayError
from kvrelay.types import Role


@dataclass(frozen=True, slots=True)
class SendExtend:
    """Hand over known ids; `final`: the answer is complete."""

    leg: int
    first_index: int
    ids: tuple[int, ...]
    final: bool = False


@dataclass(frozen=True, slots=True)
class SendResume:
    """Hand over known ids and let the leg sample from there on."""

    leg: int
    first_index: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SendStop:
    """Sample no more; what the leg still sends is dropped."""

    leg: int


@dataclass(frozen=True, slots=True)
class CloseLeg:
    """Close the leg's stream: the stage releases everything."""

    leg: int
    failed: bool = False
    """The stage is to blame: not to be chosen for this request again."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Open another leg of this role and have the prompt's KV pushed to it; answer with fed() or unfed()."""

    role: Role
    why: str
    whole_answer: bool = False
    """A relay leg that may have to go on to the end: reserve room for max_tokens."""


@dataclass(frozen=True, slots=True)
class Count:
    """A fallback or event that a person should see."""

    reason: str


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment for the request's timeline."""

    name: str


@dataclass(frozen=True, slots=True)
class AwaitToken:
    """Main decode's turn comes after this relay's next token: call turn_due(leg) if there is none for a while."""

    leg: int


@dataclass(frozen=True, slots=True)
class Replan:
    """No token has been accepted and the route broke: close every leg and plan again."""

    error: KvrelayError


@dataclass(frozen=True, slots=True)
class Wait:
    """Nobody can go on, but a stage may come back: call gave_up(error) after a while."""

    error: KvrelayError


@dataclass(frozen=True, slots=True)
class Fail:
    """The answer cannot be completed."""

    error: KvrelayError


Action = SendExtend | SendResume | SendStop | CloseLeg | Feed | Count | Mark | AwaitToken | Replan | Wait | Fail
