"""What the clients of a load run say: conversations of turns, and one request of them. Pure; knows no clock."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation: the conversation so far, then these ids."""

    fresh_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    think_s: float = 0.0
    """From the end of the last answer to this request: a person reads, a tool runs."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow each other; a turn's prompt is the last prompt, its answer, and the turn's own ids."""

    name: str
    opening_ids: tuple[int, ...]
    """In front of the first turn: shared with other conversations, so that caches can hold it."""
    turns: tuple[Turn, ...]
    arrival_s: float | None = None
    """When it starts, since the run began, if the workload is a trace; arrivals may ignore it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, ready to be sent."""

    conversation: str
    turn: int
    """From 0."""
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    due_s: float = 0.0
    """When it should be sent, since the run began; what it is sent later is this client's queue time."""
    manner: str = ""
    """Empty, or how its client misbehaves: "cancel", "slow", "probe" (see hostile.py)."""


class Workload(Protocol):
    """Where a load run gets its conversations; the same ones each time it is asked. Picklable."""

    def warm_up(self) -> Sequence[Conversation]:
        """To be run before the measured ones, so that caches hold what these share."""

    def conversations(self) -> Iterator[Conversation]:
        """The measured ones, in order of arrival; may be endless, when the run has a duration."""
