"""What charts are made of: a request's segments, a staircase, buckets, ticks."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvrelay.load.report.charts import first_tokens, link, timeline
from kvrelay.load.report.charts.buckets import Buckets
from kvrelay.load.report.charts.first_tokens import steps
from kvrelay.load.report.charts.timeline import Segment, segments
from kvrelay.load.report.scale import Scale, log_ticks, nice_high, round_ticks
from kvrelay.load.surroundings import LinkSample
from tests.unit.load.report.runs import many, record, watched


def rounded(parts: list[Segment]) -> list[tuple[str, float, float]]:
    return [(part.kind, round(part.start_s, 6), round(part.end_s, 6)) for part in parts]


def test_a_relayed_request_is_queue_prefill_relay_hand_off_and_main() -> None:
    assert rounded(segments(record())) == [
        ("queue", 0.9, 1.0),
        ("prefill", 1.0, 1.1),
        ("relay", 1.1, 1.13),
        ("relay", 1.13, 1.16),
        ("handoff", 1.16, 1.25),
        ("main", 1.25, 1.31),
    ]


def test_a_request_without_relay_waits_for_main_after_its_first_token() -> None:
    parts = segments(record(sources="pmm", arrived_ms=(100.0, 400.0, 420.0), due_s=1.0))
    assert rounded(parts) == [("prefill", 1.0, 1.1), ("wait", 1.1, 1.4), ("main", 1.4, 1.42)]


def test_a_request_without_a_token_waits_until_its_end() -> None:
    parts = segments(record(sources="", arrived_ms=(), e2el_ms=700.0))
    assert rounded(parts) == [("queue", 0.9, 1.0), ("prefill", 1.0, 1.7)]


def test_segments_leave_no_hole() -> None:
    for one in many(50):
        parts = segments(one)
        for before, after in zip(parts, parts[1:], strict=False):
            assert after.start_s == pytest.approx(before.end_s)
        if one.arrived_ms:
            assert parts[-1].end_s == pytest.approx(one.sent_s + one.arrived_ms[-1] / 1e3)


def test_a_few_of_many_are_chosen_evenly() -> None:
    chosen = timeline.sampled(many(1000), 10)
    assert [one.conversation for one in chosen] == [f"c{number}" for number in range(0, 1000, 100)]


def test_a_staircase_reaches_the_whole_at_its_last_time() -> None:
    assert steps([1.0, 2.0], 0.0, 4.0) == [(0, 0), (1, 0), (1, 50), (2, 50), (2, 100), (4, 100)]
    assert steps([], 0.0, 4.0) == [(0, 0), (4, 0)]
    of_many = steps([float(n) for n in range(12_345)], 0.0, 2e4)
    assert len(of_many) < 2000 and of_many[-1] == (2e4, 100.0)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 1e9))
def test_what_is_spread_over_buckets_is_all_there(one: float, other: float, amount: float) -> None:
    buckets = Buckets(0.0, 100.0, 7)
    start, end = sorted((one, other))
    assert sum(part for _, part in buckets.spread(start, end, amount)) == pytest.approx(amount, rel=1e-6, abs=1e-6)


def test_the_links_bytes_are_those_counted_and_time_0_is_the_runs_beginning() -> None:
    samples = [LinkSample(50.0 + n / 4, 250_000 * n, 0, 0) for n in range(41)]
    shown = link.chart([record(sent_s=7.0, e2el_ms=1000.0)], samples, 2e6)
    assert "A to B: 1 MB/s" in shown.drawn
    assert "-2.00 to -1.75 s" in shown.drawn
    assert "Before 0: the warm-up" in shown.says


def test_a_link_watched_for_no_time_says_nothing() -> None:
    samples = [LinkSample(0.0, 0, 0, 0), LinkSample(5e-173, 0, 0, 0)]
    assert "was not watched" in link.chart([], samples, 0.0).empty


def test_without_a_watched_link_bytes_are_estimated_and_the_chart_says_so() -> None:
    shown = link.chart([record()], [], 0.0)
    assert "estimate" in shown.says and shown.drawn
    assert "was not watched" in link.chart([record(wan_bytes=0)], watched(0.3), 0.0).empty


finite = st.floats(-1e9, 1e9, allow_nan=False)


@given(finite, finite, st.integers(2, 12))
def test_ticks_are_few_within_and_in_order(one: float, other: float, most: int) -> None:
    low, high = sorted((one, other))
    ticks = round_ticks(low, high, most)
    assert len(ticks) <= most + 1
    assert ticks == sorted(ticks)
    slack = 1e-6 * max(1.0, high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@given(st.floats(1e-3, 1e7), st.floats(1.5, 1e6), st.integers(3, 12))
def test_logarithmic_ticks_are_few_and_within(low: float, ratio: float, most: int) -> None:
    ticks = log_ticks(low, low * ratio, most)
    assert len(ticks) <= most
    assert all(low * 0.999 <= tick <= low * ratio * 1.001 for tick in ticks)


@given(st.floats(0, 1e12))
@example(5e-324)
def test_an_axis_reaches_beyond_its_largest_value(most: float) -> None:
    high = nice_high(most)
    assert most < high and math.isfinite(high)


@given(st.floats(1e-3, 1e6), st.booleans())
def test_a_place_on_an_axis_is_within_it_and_comes_back(value: float, log: bool) -> None:
    scale = Scale(1.0, 1000.0, 10.0, 500.0, log)
    place = scale(value)
    assert 10 <= place <= 500
    assert scale.value(place) == pytest.approx(min(1000.0, max(1.0, value)))


def test_labels_tell_neighbours_apart() -> None:
    assert [label for _, label in Scale(0, 0.03, 0, 1).ticks(3)] == ["0.00", "0.01", "0.02", "0.03"]
    assert [label for _, label in Scale(0, 3000, 0, 1).ticks(3)] == ["0", "1,000", "2,000", "3,000"]
    assert [label for _, label in Scale(0.05, 20, 0, 1, log=True).ticks(3)] == ["0.1", "1", "10"]


@pytest.mark.parametrize(
    ("count", "named"), [(1, []), (2, ["P50"]), (10, ["P50", "P90"]), (100, ["P50", "P90", "P99"])]
)
def test_only_percentiles_that_so_many_requests_can_tell_are_named(count: int, named: list[str]) -> None:
    drawn = first_tokens.chart([record()] * count).drawn
    assert [name for name in ("P50", "P90", "P99") if f">{name} 100.0 ms<" in drawn] == named
