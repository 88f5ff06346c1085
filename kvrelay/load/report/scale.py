"""From values to places on an axis: ticks at round values, and units that suit a size. Pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

_LEAST = 1e-300
"""Below this there is nothing to tell apart, and floats run out of digits."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Values low..high lie at places start..end (px). log: both > 0, equal ratios are equal distances."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The place; of a value outside, the nearer end."""
        value = min(self.high, max(self.low, value))
        if not self.high > self.low:
            share = 0.5
        elif self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def value(self, place: float) -> float:
        """The other way."""
        share = (place - self.start) / (self.end - self.start)
        if self.log:
            return self.low * math.exp(share * math.log(self.high / self.low))
        return self.low + share * (self.high - self.low)

    def ticks(self, most: int = 8) -> list[tuple[float, str]]:
        """(value, label) of round values within; about `most`."""
        values = log_ticks(self.low, self.high, most) if self.log else round_ticks(self.low, self.high, most)
        step = min((b - a for a, b in zip(values, values[1:], strict=False)), default=values[0] if values else 1.0)
        return [(value, label(value, value if self.log else step)) for value in values]


def round_ticks(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 × a power of ten, at most `most` + 1."""
    rough = (high - low) / most
    if not rough > _LEAST:
        return [low]
    power: float = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, min(last, first + most) + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Round ones between and at powers of ten, as many as there is room for; else some of the powers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 3, 5, 7), (1, 2, 5), (1,)):
        values = [factor * 10.0**power for power in powers for factor in factors]
        within = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(within) <= most:
            break
    return within[:: max(1, math.ceil(len(within) / most))]


def label(value: float, step: float) -> str:
    """ "1,200" or "0.05": as many decimals as tell neighbours apart."""
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    return f"{value:,.{min(digits, 9)}f}"


@dataclass(frozen=True, slots=True)
class Unit:
    """Values are divided by `size` and followed by `name`."""

    name: str
    size: float


def unit_for(most: float, units: Iterable[Unit]) -> Unit:
    """The largest of which `most` has at least one; else the first. units: from small to large."""
    first, *larger = units
    return next((unit for unit in reversed(larger) if most >= unit.size), first)


BYTES_PER_S = (Unit("B/s", 1), Unit("kB/s", 1e3), Unit("MB/s", 1e6), Unit("GB/s", 1e9))


def span_unit(most_ms: float) -> Unit:
    """Of a chart of times up to `most_ms`: ms below 10 s, else s."""
    return Unit("s", 1e3) if most_ms >= 1e4 else Unit("ms", 1)


def nice_high(most: float) -> float:
    """A little above `most`, at a tick; 1 if there is nothing."""
    if not most / 8 > _LEAST:
        return 1.0
    ticks = round_ticks(0.0, most * 1.25, 8)
    return next((tick for tick in ticks if tick >= most * 1.02), most * 1.25)
