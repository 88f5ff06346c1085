"""How much of the prompts the caches of P and of MD held, over the run."""

from collections.abc import Sequence

import numpy as np

from kvrelay.load.record import Record
from kvrelay.load.report.charts.buckets import Buckets
from kvrelay.load.report.plot import Chart, Entry, Plot, across, upwards

MOST_BUCKETS = 24
REQUESTS_A_BUCKET = 8
"""About; fewer buckets rather than emptier ones."""


def chart(records: Sequence[Record]) -> Chart:
    """Of whole requests beyond the warm-up, by when they were sent."""
    name, title = "hits", "Prefix hits at P and at MD"
    whole = [record for record in records if record.ok and not record.warm_up and record.prompt_tokens]
    at_p = [(r.sent_s, 100 * r.hit_prefill) for r in whole if r.prefill]
    at_main = [(r.sent_s, 100 * r.hit_main) for r in whole if r.main or not r.pipeline]
    sides = [("prefill", "P", at_p), ("main", "MD" if any(r.main for r in whole) else "server", at_main)]
    sides = [side for side in sides if side[2]]
    if not sides:
        says = "Share of each prompt that a cache held."
        return Chart(name, title, says, empty="No request ended whole, so no stage has told what its cache held.")
    moments = [at_s for _, _, hits in sides for at_s, _ in hits]
    count = max(1, min(MOST_BUCKETS, len(whole) // REQUESTS_A_BUCKET))
    low = min(moments)
    buckets = Buckets(low, max(*moments, low + 1e-3), count)
    says = (
        f"Of each prompt, the share that was in a cache: median (line) and P10 to P90 (band) of the requests sent "
        f"within {buckets.width_s:,.3g} s each; side by side."
    )
    plot = Plot(across(buckets.low_s, buckets.high_s), upwards(0, 100), "sent, since the run began (s)", "hit (%)")
    found = [(kind, side, [_band(values) for values in buckets.sorted(hits)]) for kind, side, hits in sides]
    for number, (kind, _, bands) in enumerate(found):
        _draw(plot, buckets, kind, number, bands)
    tips = []
    for number in range(count):
        start, end = buckets.edges(number)
        said = [f"{side}: {_said(bands[number])}" for _, side, bands in found]
        tips.append((start, end, "\n".join([f"{start:,.1f} to {end:,.1f} s", *said])))
    plot.strips(tips)
    legend = [Entry(kind, f"at {'the ' if side == 'server' else ''}{side}") for kind, side, _ in found]
    return Chart(name, title, says, plot.drawn(name, title, says), legend=legend)


Band = tuple[int, float, float, float] | None
"""Requests, P10, median and P90; None without requests."""


def _band(values: Sequence[float]) -> Band:
    if not values:
        return None
    p10, p50, p90 = (float(p) for p in np.percentile(values, [10, 50, 90]))
    return len(values), p10, p50, p90


def _said(band: Band) -> str:
    if band is None:
        return "no request"
    return f"median {band[2]:.0f} %, P10 {band[1]:.0f} %, P90 {band[3]:.0f} % of {band[0]} requests"


def _draw(plot: Plot, buckets: Buckets, kind: str, side: int, bands: Sequence[Band]) -> None:
    """Steps on the left (side 0) or the right half of their bucket; one without requests leaves a hole."""
    for number, band in enumerate(bands):
        if band is not None:
            (low, high), (_, p10, p50, p90) = buckets.edges(number), band
            place, width = 0.06 + 0.46 * side, 0.42
            start, end = (low + (high - low) * share for share in (place, place + width))
            plot.area([(start, p90), (end, p90)], [(start, p10), (end, p10)], kind)
            plot.line([(start, p50), (end, p50)], kind)
