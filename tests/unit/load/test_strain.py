"""A run says when the generator itself was near its limit."""

from kvrelay.load.record import Record
from kvrelay.load.strain import strain


def records(queue_ms: float, ttft_ms: float = 100.0) -> list[Record]:
    return [Record("c", 0, "ok", queue_ms=queue_ms, arrived_ms=(ttft_ms,), output_tokens=1)] * 10


def test_a_run_at_ease_says_nothing() -> None:
    assert strain(records(3.0), 0.4, queues=False) == []
    assert strain([], 0.0, queues=False) == []


def test_a_busy_core_is_said() -> None:
    (text,) = strain(records(3.0), 0.85, queues=False)
    assert "85% of a core" in text and "--processes" in text and "--self-test" in text


def test_lateness_is_said_if_it_can_show_in_the_times() -> None:
    (text,) = strain(records(40.0), 0.1, queues=False)
    assert "late, P99 40 ms" in text
    assert strain(records(40.0, ttft_ms=5000.0), 0.1, queues=False) == []


def test_a_queue_that_was_asked_for_is_no_lateness() -> None:
    assert strain(records(4000.0), 0.1, queues=True) == []
