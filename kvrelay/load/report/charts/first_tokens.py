"""How soon the first and the second token came: cumulative distributions."""

import bisect
from collections.abc import Sequence

from kvrelay.load.record import Record
from kvrelay.load.report.plot import Chart, Entry, Plot, Point, across, upwards
from kvrelay.load.report.scale import nice_high, span_unit
from kvrelay.load.spread import Spread

LOG_FROM = 30.0
"""Longest ÷ shortest: from here on, the axis is logarithmic."""
MOST_POINTS = 500
STRIPS = 80


def chart(records: Sequence[Record]) -> Chart:
    """Of the counted ones."""
    counted = [record for record in records if record.counted]
    first = sorted(record.ttft_ms for record in counted if record.ttft_ms is not None)
    second = sorted(record.ttst_ms for record in counted if record.ttst_ms is not None)
    name, title = "first-tokens", "Time to the first and to the second token"
    says = (
        f"Share of requests whose token had come by then: {len(first):,} first tokens, {len(second):,} second ones. "
        "A system that sends its first token early and then stalls shows it in the second."
    )
    if not first:
        return Chart(name, title, says, empty="No whole answer has a token, so there is no time to show.")
    plot = _plot(first, second)
    legend = [Entry("prefill", "first token (TTFT)")] + ([Entry("relay", "second token (TTST)")] if second else [])
    return Chart(name, title, says, plot.drawn(name, title, says), legend=legend)


def _plot(first: list[float], second: list[float]) -> Plot:
    longest, shortest = max([first[-1], *second[-1:], 1e-3]), max(min([first[0], *second[:1]]), 1e-3)
    unit = span_unit(longest)
    digits = 1 if unit.name == "ms" else 2
    log = longest / shortest >= LOG_FROM
    low, high = shortest / unit.size, longest / unit.size
    x = across(low * 0.95, high * 1.05, log=True) if log else across(0, nice_high(high))
    axis = f"time since the request was sent ({unit.name}{', logarithmic' if log else ''})"
    plot = Plot(x, upwards(0, 100), axis, "requests (%)")
    for times, kind in ((second, "relay"), (first, "prefill")):
        plot.line(steps([time / unit.size for time in times], x.low, x.high), kind)
    for share, time in _known(first):
        plot.dot(
            time / unit.size, 100 * share, f"P{100 * share:.0f} {time / unit.size:,.{digits}f} {unit.name}", "prefill"
        )
    plot.strips(_tips(plot, first, second, unit.size, unit.name))
    return plot


def _known(times: Sequence[float]) -> list[tuple[float, float]]:
    """(share, time) of the percentiles that so few times can tell: P99 takes a hundred."""
    spread = Spread.of(times)
    if spread is None:
        return []
    known = ((0.5, spread.p50), (0.9, spread.p90), (0.99, spread.p99))
    return [(share, time) for share, time in known if len(times) * (1 - share) >= 1 - 1e-9]


def steps(times: Sequence[float], low: float, high: float) -> list[Point]:
    """A staircase from (low, 0) to (high, 100) through sorted times; of many, about MOST_POINTS."""
    points: list[Point] = [(low, 0.0)]
    stride = max(1, len(times) // MOST_POINTS)
    for place in [*range(stride - 1, len(times) - 1, stride), len(times) - 1] if times else []:
        points += [(times[place], points[-1][1]), (times[place], 100 * (place + 1) / len(times))]
    return [*points, (high, points[-1][1])]


def _tips(
    plot: Plot, first: Sequence[float], second: Sequence[float], size: float, unit: str
) -> list[tuple[float, float, str]]:
    width = (plot.x.end - plot.x.start) / STRIPS
    tips = []
    for number in range(STRIPS):
        low, high = (plot.x.value(plot.x.start + width * edge) for edge in (number, number + 1))
        by = (low + high) / 2
        shares = [
            f"{name} {bisect.bisect_right(times, by * size) / len(times):.1%}"
            for name, times in (("first token", first), ("second token", second))
            if times
        ]
        tips.append((low, high, f"by {by:,.4g} {unit}: {', '.join(shares)}"))
    return tips
