"""What this process could not do as planned before it serves, by reason. A stage counts it among its fallbacks."""

import logging
from collections import Counter

taken: Counter[str] = Counter()


def fall_back(log: logging.Logger, reason: str, message: str, *args: object) -> None:
    """Counts `reason` and warns."""
    taken[reason] += 1
    log.warning(message, *args)
