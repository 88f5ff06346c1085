"""Which stage the tokens came from, over the run."""

from collections.abc import Sequence

from kvrelay.load.record import LETTERS, Record
from kvrelay.load.report.charts.buckets import Buckets
from kvrelay.load.report.plot import Chart, Entry, Plot, across, upwards
from kvrelay.load.report.scale import nice_high

MOST_BUCKETS = 60
NAMES = {"prefill": "P (first tokens)", "relay": "relay decode", "main": "main decode", "server": "server"}


def chart(records: Sequence[Record]) -> Chart:
    """Of all tokens that came, by when they came."""
    name, title = "tokens", "Output tokens by stage"
    came = {source: _moments(records, letter) for source, letter in LETTERS.items()}
    came = {source: moments for source, moments in came.items() if moments}
    total = sum(len(moments) for moments in came.values())
    if not total:
        return Chart(name, title, "Tokens per second, stacked by stage.", empty="No token came.")
    shares = ", ".join(f"{NAMES[source]} {len(moments) / total:.1%}" for source, moments in came.items())
    last = max(max(moments) for moments in came.values())
    buckets = Buckets(0.0, max(last, 1e-3), max(1, min(MOST_BUCKETS, total // 4)))
    says = (
        f"Tokens per second at the clients, stacked, means of {buckets.width_s:,.2g} s; those of the warm-up and of "
        f"broken answers too. Of {total:,} tokens: {shares}."
    )
    says += " No request was relayed." if "main" in came and "relay" not in came else ""
    rates = {
        source: [len(piece) / buckets.width_s for piece in buckets.sorted((at_s, 1.0) for at_s in moments)]
        for source, moments in came.items()
    }
    plot = _plot(buckets, rates)
    legend = [Entry(source, NAMES[source]) for source in rates]
    return Chart(name, title, says, plot.drawn(name, title, says), legend=legend)


def _moments(records: Sequence[Record], letter: str) -> list[float]:
    """When tokens of a stage came, s since the run began."""
    return [
        record.sent_s + at_ms / 1e3
        for record in records
        for source, at_ms in zip(record.sources, record.arrived_ms, strict=False)
        if source == letter
    ]


def _plot(buckets: Buckets, rates: dict[str, list[float]]) -> Plot:
    sums = [sum(column) for column in zip(*rates.values(), strict=True)]
    plot = Plot(across(0, buckets.high_s), upwards(0, nice_high(max(sums))), "since the run began (s)", "tokens/s")
    bottom = [0.0] * buckets.count
    for source in [name for name in ("main", "relay", "prefill", "server") if name in rates]:
        top = [low + rate for low, rate in zip(bottom, rates[source], strict=True)]
        for number, (low, high) in enumerate(zip(bottom, top, strict=True)):
            if high > low:
                plot.bar(buckets.edges(number), (low, high), source)
        bottom = top
    tips = []
    for number in range(buckets.count):
        start, end = buckets.edges(number)
        said = [f"{NAMES[source]}: {column[number]:,.1f} tokens/s" for source, column in rates.items()]
        tips.append((start, end, "\n".join([f"{start:,.2f} to {end:,.2f} s", *said])))
    plot.strips(tips)
    return plot
