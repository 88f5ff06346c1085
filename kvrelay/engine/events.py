"""What the engine tells of one sequence, in order. Knows no delivery."""

from dataclasses import dataclass

from kvrelay.errors import KvrelayError
from kvrelay.types import FinishReason, TokenRun


@dataclass(frozen=True, slots=True)
class Admitted:
    """Room is reserved and the cache was looked up. Once per sequence, also if it is preempted later."""

    cached_tokens: int
    """Of the prompt, whole blocks, found in the cache."""
    block_ids: list[int]
    """Pool blocks of the prompt's whole blocks, in order; the first cached_tokens / block_tokens hold KV already.

    They stay valid until close() for a sequence that is not loading, and until commit() for one that is.
    """


@dataclass(frozen=True, slots=True)
class Computed:
    """The first `blocks` whole blocks of the prompt are in the pool now. Sent when computing made that number grow."""

    blocks: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """A held sequence has KV of all ids but the last (sample=False: of the prompt's whole blocks).

    Once after admission (after commit, if it was loading), and once after each extend without resume; a resume
    cancels it. Two extends before it have one answer.
    """

    next_index: int
    """Output ids known."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Sampled tokens."""

    run: TokenRun


@dataclass(frozen=True, slots=True)
class Paused:
    """The output budget is used up: no index >= next_index is sampled here. Once."""

    next_index: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The answer to stop(), unless the sequence had finished. Blocks are kept until close()."""

    next_index: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete. Blocks are kept until close()."""

    reason: FinishReason
    completion_tokens: int
    """All output ids from index 0, those given from outside included."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Nothing more will come. Blocks are kept until close()."""

    error: KvrelayError


Event = Admitted | Computed | CaughtUp | Tokens | Paused | Stopped | Finished | Failed
