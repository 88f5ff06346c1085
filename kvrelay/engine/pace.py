"""Emulated accelerator speed: how long a step must last at least. Knows no sequence, only counts."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from kvrelay.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Pace:
    """Milliseconds that a step lasts at least; all zero: as fast as this machine is."""

    fixed: float = 0.0
    """Per step."""
    token: float = 0.0
    """Per new token."""
    context: float = 0.0
    """Per token attended to, summed over the step's sequences."""
    sequence: float = 0.0
    """Per sequence in the step."""

    @classmethod
    def parse(cls, text: str) -> "Pace":
        """Reads "fixed=MS,token=MS,context=MS,sequence=MS", any subset in any order; "" is no pace.

        InvalidRequest("pace", ...) on an unknown or repeated name, or a value that is no finite number >= 0.
        """
        names = [f.name for f in fields(cls)]
        values: dict[str, float] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            name, _, number = (piece.strip() for piece in part.partition("="))
            if name not in names or name in values:
                raise InvalidRequest("pace", f"{part!r}: expected each of {', '.join(names)} at most once, as name=MS")
            values[name] = _milliseconds(part, number)
        return cls(**values)

    def step_ms(self, new_tokens: int, context_tokens: int, sequences: int) -> float:
        """The least a step of this size may last."""
        return (
            self.fixed + self.token * new_tokens + self.context * context_tokens + self.sequence * sequences
        )  # a linear cost model, as roofline models of decode are

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))


def sleep_rest(least_ms: float, began: float, sleep: Callable[[float], None] = time.sleep) -> bool:
    """Sleeps until `least_ms` after `began` (time.perf_counter seconds), off the GIL. True if that had passed."""
    rest = began + least_ms / 1000 - time.perf_counter()
    if rest <= 0:
        return True
    sleep(rest)
    return False


def _milliseconds(part: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise InvalidRequest("pace", f"{part!r}: the value must be a number of milliseconds >= 0")
    return value
