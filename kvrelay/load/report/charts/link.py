"""What the WAN carried, over the run: as its emulator counted it, or else as the requests tell it."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.load.record import Record
from kvrelay.load.report.charts.buckets import Buckets
from kvrelay.load.report.plot import Chart, Entry, Plot, across, upwards
from kvrelay.load.report.scale import BYTES_PER_S, Unit, nice_high, unit_for
from kvrelay.load.surroundings import LinkSample

MOST_BUCKETS = 120
NAME, TITLE = "link", "Use of the link between the sites"


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes/s by bucket."""

    kind: str
    name: str
    rates: list[float]


SHORTEST_S = 1e-3
"""That a link must have been watched, to say anything of its use."""


def chart(records: Sequence[Record], samples: Sequence[LinkSample], rate_bytes_per_s: float) -> Chart:
    """samples: the last was taken as the run ended. rate_bytes_per_s: of the link; 0: not known, or unlimited."""
    end_s = max((record.sent_s + record.e2el_ms / 1e3 for record in records), default=0.0)
    if len(samples) > 1 and samples[-1].at_s - samples[0].at_s >= SHORTEST_S:
        return _counted(samples, end_s, rate_bytes_per_s)
    return _told(records, end_s, rate_bytes_per_s)


def _counted(samples: Sequence[LinkSample], end_s: float, rate_bytes_per_s: float) -> Chart:
    zero_s = samples[-1].at_s - end_s
    steps = [(a, b) for a, b in zip(samples, samples[1:], strict=False) if b.at_s > a.at_s]
    buckets = Buckets(samples[0].at_s - zero_s, end_s, min(MOST_BUCKETS, len(steps)))
    out, back = [0.0] * buckets.count, [0.0] * buckets.count
    for a, b in steps:
        for rates, amount in ((out, b.out_bytes - a.out_bytes), (back, b.back_bytes - a.back_bytes)):
            for number, part in buckets.spread(a.at_s - zero_s, b.at_s - zero_s, amount):
                rates[number] += part / buckets.width_s
    says = f"Bytes per second through the WAN emulator, all in, means of {buckets.width_s:,.2g} s."
    says += " Before 0: the warm-up of the caches." if buckets.low_s < -buckets.width_s else ""
    return _drawn(says, buckets, [Flow("main", "A to B", out), Flow("relay", "B to A", back)], rate_bytes_per_s)


def _told(records: Sequence[Record], end_s: float, rate_bytes_per_s: float) -> Chart:
    crossings = [found for record in records if (found := _crossing(record)) is not None]
    says = "The link was not watched (--wan). An estimate instead: "
    says += "each request's KV bytes, spread evenly from its prefill's start to main decode's readiness."
    if not crossings:
        empty = "The link was not watched (--wan), and no request says that KV crossed it."
        return Chart(NAME, TITLE, "Bytes per second between the sites.", empty=empty)
    buckets = Buckets(0.0, max(end_s, *(end for _, end, _ in crossings), 1e-3), MOST_BUCKETS // 2)
    rates = [0.0] * buckets.count
    for start, end, amount in crossings:
        for number, part in buckets.spread(start, end, amount):
            rates[number] += part / buckets.width_s
    return _drawn(says, buckets, [Flow("main", "A to B, estimated", rates)], rate_bytes_per_s)


def _crossing(record: Record) -> tuple[float, float, int] | None:
    """From when to when, s, and how many bytes of its KV crossed."""
    if not record.wan_bytes:
        return None
    at_ms = dict(reversed(record.timeline))
    start = at_ms.get("prefill_started", 0.0)
    end = max(start, at_ms.get("main_ready", record.e2el_ms))
    return record.sent_s + start / 1e3, record.sent_s + end / 1e3, record.wan_bytes


def _drawn(says: str, buckets: Buckets, flows: Sequence[Flow], link_rate: float) -> Chart:
    most = max(max(flow.rates) for flow in flows)
    shown = link_rate if link_rate and link_rate < 20 * most else 0.0
    unit = unit_for(max(most, shown), BYTES_PER_S)
    high = nice_high(max(most, shown) / unit.size)
    plot = Plot(across(buckets.low_s, buckets.high_s), upwards(0, high), "since the run began (s)", unit.name)
    for flow in flows:
        _draw(plot, buckets, flow, unit)
    if shown:
        plot.level(shown / unit.size, f"the link's rate, {shown / unit.size:,.3g} {unit.name}")
    tips = []
    for number in range(buckets.count):
        start, end = buckets.edges(number)
        said = [f"{flow.name}: {flow.rates[number] / unit.size:,.3g} {unit.name}" for flow in flows]
        tips.append((start, end, "\n".join([f"{start:,.2f} to {end:,.2f} s", *said])))
    plot.strips(tips)
    if link_rate and not shown:
        whole = unit_for(link_rate, BYTES_PER_S)
        says += f" The link's rate, {link_rate / whole.size:,.3g} {whole.name}, is far above the chart."
    legend = [Entry(flow.kind, flow.name) for flow in flows]
    return Chart(NAME, TITLE, says, plot.drawn(NAME, TITLE, says), legend=legend)


def _draw(plot: Plot, buckets: Buckets, flow: Flow, unit: Unit) -> None:
    points = [(edge, rate / unit.size) for number, rate in enumerate(flow.rates) for edge in buckets.edges(number)]
    plot.area(points, [(x, 0.0) for x, _ in points], flow.kind)
    plot.line(points, flow.kind)
