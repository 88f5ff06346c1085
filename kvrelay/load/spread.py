"""Mean, std and percentiles of one kind of number. Knows nothing else."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Of `count` values, in their unit. Percentiles are interpolated linearly; std is of the population."""

    count: int
    mean: float
    std: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """Of the values that are not None; None if there are none."""
        known = np.array([value for value in values if value is not None], dtype=np.float64)
        if not known.size:
            return None
        p50, p90, p99 = (float(p) for p in np.percentile(known, [50, 90, 99]))
        return cls(known.size, float(known.mean()), float(known.std()), p50, p90, p99, float(known.max()))
