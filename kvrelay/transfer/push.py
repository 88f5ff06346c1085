"""What became of a push: the nouns a prefill stage reports. Moves no bytes."""

import enum
from dataclasses import dataclass


class PushOutcome(enum.StrEnum):
    """How a push ended."""

    COMMITTED = "committed"
    ENDED = "ended"
    """By the receiver, or cancelled here: nobody's error."""
    FAILED = "failed"
    """The peer could not be reached for too long, refused the layout, or the feed failed."""


@dataclass(frozen=True, slots=True)
class PushResult:
    """The end of a push."""

    outcome: PushOutcome
    detail: str = ""
    """Why, if not committed."""
    wire_bytes: int = 0
    """Frames with headers, resent ones included."""
    blocks_sent: int = 0
    blocks_cached: int = 0
    """Held by the receiver before."""
    seconds: float = 0.0
    """From the first Offer to the end."""


@dataclass(frozen=True, slots=True)
class PushProgress:
    """How far a push is."""

    payload_bytes_acked: int
    payload_bytes_missing: int
    """At the start: what the receiver asked for."""
