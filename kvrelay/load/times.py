"""The times that follow from when an answer's tokens came. Knows nothing else of the answer."""

from collections.abc import Sequence
from typing import Protocol


class Arrived(Protocol):
    """An answer, as far as times need it."""

    @property
    def arrived_ms(self) -> Sequence[float]:
        """One per token, since the request was sent; tokens that came together share theirs."""

    @property
    def output_tokens(self) -> int:
        """All of its tokens, of which some may have no time of their own."""


class TokenTimes:
    """What an Arrived inherits, in ms."""

    __slots__ = ()

    @property
    def ttft_ms(self: Arrived) -> float | None:
        """Time to the first token; None if there is none."""
        return self.arrived_ms[0] if self.arrived_ms else None

    @property
    def ttst_ms(self: Arrived) -> float | None:
        """Time to the second token; None if there is none."""
        return self.arrived_ms[1] if len(self.arrived_ms) > 1 else None

    @property
    def itl_ms(self: Arrived) -> list[float]:
        """Gaps between neighbouring tokens, one fewer than tokens."""
        return gaps(self.arrived_ms)

    @property
    def max_gap_ms(self: Arrived) -> float:
        """The longest gap; 0 if there is none."""
        return max(gaps(self.arrived_ms), default=0.0)

    @property
    def tpot_ms(self: Arrived) -> float | None:
        """Mean time per token after the first; None if there is none."""
        if self.output_tokens < 2 or len(self.arrived_ms) < 2:
            return None
        return (self.arrived_ms[-1] - self.arrived_ms[0]) / (self.output_tokens - 1)


def gaps(moments: Sequence[float]) -> list[float]:
    """Between neighbours."""
    return [after - before for before, after in zip(moments, moments[1:], strict=False)]
