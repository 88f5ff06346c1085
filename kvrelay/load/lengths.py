"""Numbers drawn by distribution: fixed, uniform, lognormal. Knows no unit and no token."""

import math
from dataclasses import dataclass

import numpy as np

MOST_TOKENS = 2**31
FORMS = "N, LOW-HIGH, or lognormal:MEDIAN:SIGMA[:MAX]"


@dataclass(frozen=True, slots=True)
class Spreading:
    """Numbers >= 0 drawn evenly from [low, high]; with `sigma`, lognormally with median `low`, at most `high`."""

    low: float
    high: float
    sigma: float = 0.0
    """Of the logarithm; 0 = uniform."""

    @classmethod
    def parse(cls, text: str) -> "Spreading":
        """ "0.5", "0.1-2", "lognormal:0.5:1", "lognormal:0.5:1:30". ValueError otherwise, naming the text."""
        try:
            made = cls._lognormal(text) if text.startswith("lognormal:") else cls._uniform(text)
        except ValueError:
            raise ValueError(f"{text}: expected {FORMS}") from None
        most = made.low if made.sigma else made.high
        if not 0 <= made.low <= made.high or not (made.sigma >= 0 and math.isfinite(most + made.sigma)):
            raise ValueError(f"{text}: expected 0 <= low <= high and sigma >= 0, all finite")
        return made

    @classmethod
    def _uniform(cls, text: str) -> "Spreading":
        low, dash, high = text.partition("-")
        return cls(float(low), float(high if dash else low))

    @classmethod
    def _lognormal(cls, text: str) -> "Spreading":
        _, median, sigma, *most = text.split(":")
        if len(most) > 1:
            raise ValueError
        return cls(float(median), float(most[0]) if most else math.inf, float(sigma))

    def draw(self, chance: np.random.Generator) -> float:
        """One number."""
        if self.sigma:
            return min(self.low * math.exp(self.sigma * float(chance.standard_normal())), self.high)
        return float(chance.uniform(self.low, self.high)) if self.high > self.low else self.low


@dataclass(frozen=True, slots=True)
class Lengths:
    """Whole numbers >= 1 by the same distributions; uniform ones include both ends."""

    low: int
    high: int
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """ "512", "128-1024", "lognormal:300:1.2:4000". ValueError otherwise."""
        spreading = Spreading.parse(text)
        high = MOST_TOKENS if math.isinf(spreading.high) else spreading.high
        lengths = cls(int(spreading.low), int(high), spreading.sigma)
        if not 1 <= lengths.low <= lengths.high <= MOST_TOKENS or (lengths.low, lengths.high) != (spreading.low, high):
            raise ValueError(f"{text}: expected whole numbers, 1 <= low <= high <= 2**31")
        return lengths

    def draw(self, chance: np.random.Generator) -> int:
        """One length."""
        if self.sigma:
            return max(1, round(Spreading(self.low, self.high, self.sigma).draw(chance)))
        return int(chance.integers(self.low, self.high, endpoint=True))
