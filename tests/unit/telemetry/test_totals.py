"""What GetFleet shows of the counters."""

from kvrelay.telemetry.metrics import RouterMetrics
from kvrelay.telemetry.totals import totals


def test_counters_and_sums_are_named_by_metric_and_label_without_zeros() -> None:
    metrics = RouterMetrics()
    assert totals(metrics.registry) == {}
    metrics.hits(prefill=64, main=16)
    metrics.handoff_stall.labels("one-shot").observe(0.25)
    metrics.in_flight.set(3)
    assert totals(metrics.registry) == {
        "hit_tokens/prefill": 64,
        "hit_tokens/main": 16,
        "hit_gap_tokens/prefill": 48,
        "handoff_stall_seconds_count/one-shot": 1,
        "handoff_stall_seconds_sum/one-shot": 0.25,
    }
