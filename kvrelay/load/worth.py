"""What an answer must keep to count, and what the hardware costs. Pure.

Goodput is the rate of requests that keep every limit (DistServe, OSDI '24); BCR is goodput ÷ hardware cost.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay.load.record import Record

LIMITS = {"ttft": "ttft_ms", "ttst": "ttst_ms", "tpot": "tpot_ms", "e2el": "e2el_ms", "gap": "max_gap_ms"}
ROLES = ("prefill", "relay", "main")


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in ms by name, a key of LIMITS."""

    limits_ms: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """ "ttft=1000,tpot=50ms,e2el=10s". ValueError otherwise."""
        limits = []
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in LIMITS:
                raise ValueError(f"{part!r}: expected NAME=MS with a NAME of {', '.join(LIMITS)}")
            limits.append((name, _ms(value, part)))
        return cls(tuple(limits))

    def kept_by(self, record: Record) -> bool:
        """Whether a request is whole and within every limit that it has a time for."""
        times = ((getattr(record, LIMITS[name]), limit) for name, limit in self.limits_ms)
        return record.ok and all(value is None or value <= limit for value, limit in times)


def _ms(text: str, part: str) -> float:
    number, scale = (text[:-2], 1.0) if text.endswith("ms") else (text[:-1], 1e3) if text.endswith("s") else (text, 1.0)
    try:
        value = float(number) * scale
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ValueError(f"{part!r}: expected a time > 0 in ms, or with the unit ms or s")
    return value


@dataclass(frozen=True, slots=True)
class Prices:
    """Of one stage by role, in any money per any time."""

    by_role: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, text: str) -> "Prices":
        """ "prefill=2,relay=2,main=1.2". ValueError otherwise."""
        prices = []
        for part in text.split(","):
            role, _, price = part.strip().partition("=")
            if role not in ROLES:
                raise ValueError(f"{part!r}: expected ROLE=PRICE with a ROLE of {', '.join(ROLES)}")
            try:
                prices.append((role, float(price)))
            except ValueError:
                raise ValueError(f"{part!r}: {price!r} is no price") from None
            if not prices[-1][1] >= 0:
                raise ValueError(f"{part!r}: expected a price >= 0")
        return cls(tuple(prices))

    def of_fleet(self, stages: Mapping[str, int]) -> float:
        """Of so many stages by role; a role without a price is free."""
        return sum(price * stages.get(role, 0) for role, price in self.by_role)
