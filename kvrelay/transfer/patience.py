"""How often, and for how long, a broken lane is opened again. Pure: the caller tells the time."""

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 1.0
MOST_BARREN = 8
"""Times in a row that a lane may open and break without one acknowledged frame."""


class Patience:
    """Of one lane. At once, then after 0.05 s, doubling up to 1 s; given up after `limit_s` out of reach."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._failures = 0
        self._barren = 0
        self._reached = False
        self._unreached_since: float | None = None

    @property
    def failures(self) -> int:
        """In a row, without an acknowledged frame between."""
        return self._failures

    def answered(self) -> None:
        """The receiver answered the offer."""
        self._reached = True
        self._unreached_since = None

    def moved(self) -> None:
        """A frame was acknowledged."""
        self._failures = self._barren = 0

    def broke(self, now: float) -> float | None:
        """The lane broke: how many seconds to wait before the next try; None: give up."""
        if self._unreached_since is None:
            self._unreached_since = now
        if self._reached:
            self._barren += 1
        self._reached = False
        self._failures += 1
        if now - self._unreached_since > self._limit_s or self._barren > MOST_BARREN:
            return None
        if self._failures == 1:
            return 0.0
        return float(min(FIRST_WAIT_S * 2 ** min(self._failures - 2, 16), LONGEST_WAIT_S))
