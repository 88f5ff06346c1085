"""What this process could not do with its model as planned, by reason. Its stages count it among their fallbacks."""

import logging
from collections import Counter

taken: Counter[str] = Counter()


def fall_back(log: logging.Logger, reason: str, message: str, *args: object) -> None:
    """Counts `reason` and warns."""
    taken[reason] += 1
    log.warning(message, *args)
