"""A run's time cut into equal pieces. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Buckets:
    """`count` pieces of low_s..high_s."""

    low_s: float
    high_s: float
    count: int

    @property
    def width_s(self) -> float:
        """Of each."""
        return (self.high_s - self.low_s) / self.count

    def of(self, at_s: float) -> int:
        """The piece at a moment; of one outside, the nearer end."""
        return min(self.count - 1, max(0, int((at_s - self.low_s) / self.width_s)))

    def edges(self, number: int) -> tuple[float, float]:
        """From when to when, s."""
        return self.low_s + number * self.width_s, self.low_s + (number + 1) * self.width_s

    def sorted(self, values: Iterable[tuple[float, float]]) -> list[list[float]]:
        """(moment, value)s by piece."""
        pieces: list[list[float]] = [[] for _ in range(self.count)]
        for at_s, value in values:
            pieces[self.of(at_s)].append(value)
        return pieces

    def spread(self, start_s: float, end_s: float, amount: float) -> Iterator[tuple[int, float]]:
        """(piece, its part) of an amount that came evenly from start_s to end_s."""
        if not end_s > start_s:
            yield self.of(start_s), amount
            return
        for number in range(self.of(start_s), self.of(end_s) + 1):
            low, high = self.edges(number)
            low = start_s if number == self.of(start_s) else low
            high = end_s if number == self.of(end_s) else high
            yield number, amount * (high - low) / (end_s - start_s)
