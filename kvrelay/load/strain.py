"""Whether the generator itself was near its limit in a run, so that its own delays may be in the times. Pure."""

from collections.abc import Sequence

from kvrelay.load.record import Record
from kvrelay.load.spread import Spread

NEAR_LIMIT = 0.7
"""Of a core."""
LATE_MS = 10.0
LATE_SHARE = 0.05
"""Of the median TTFT: sent later than both this and LATE_MS, at P99, is late."""


def strain(records: Sequence[Record], cpu_share: float, *, queues: bool) -> list[str]:
    """What a person must know before trusting the times; empty if nothing. cpu_share: of the busiest process.

    queues: requests may wait here on purpose (a limit of those in flight), so their lateness says nothing.
    """
    said = []
    if cpu_share >= NEAR_LIMIT:
        said.append(f"it used {cpu_share:.0%} of a core")
    late = Spread.of(record.queue_ms for record in records)
    ttft = Spread.of(record.ttft_ms for record in records)
    if late and not queues and late.p99 > max(LATE_MS, LATE_SHARE * (ttft.p50 if ttft else 0.0)):
        said.append(f"it sent requests late, P99 {late.p99:,.0f} ms (client queue)")
    if not said:
        return []
    return [
        f"the generator came near its own limit: {' and '.join(said)}. Its own delays may be in these times; use more "
        "--processes, or see --self-test"
    ]
