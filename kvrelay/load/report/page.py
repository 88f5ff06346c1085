"""A run as one HTML page that needs nothing else: no network, no other file. Pure; computes no new figure."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvrelay.load.record import Record
from kvrelay.load.report import looks, tables
from kvrelay.load.report.charts import first_tokens, hits, link, timeline, tokens
from kvrelay.load.report.markup import NOTHING, Markup, el, joined
from kvrelay.load.report.plot import Chart
from kvrelay.load.report.terminal import conditions, counted, figure_lines
from kvrelay.load.summary import Summary
from kvrelay.load.surroundings import LinkSample

MOST_REQUESTS = 500
"""In the table of requests."""
WAN_NOTE = (
    "The WAN is emulated: a TCP relay with rate, delay, jitter and outages. Packet loss, slow start and congestion "
    "control are not."
)


@dataclass(frozen=True, slots=True)
class Run:
    """All that a page shows."""

    summary: Summary
    records: Sequence[Record]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else is known, such as target, workload, arrival, seed."""
    warnings: Sequence[str] = ()
    command: str = ""
    """The command line that made it."""
    machine: str = ""
    """Where it ran."""
    link: Sequence[LinkSample] = ()
    """`Watch.samples`: the WAN emulator's counters, the last of them as the run ended; empty: not watched."""
    link_bytes_per_s: float = 0.0
    """`Watch.rate_bytes_per_s`: the link's rate, A to B; 0: not known, or unlimited."""


def page(run: Run, title: str) -> str:
    """The page's text, to be written as UTF-8."""
    charts = [
        first_tokens.chart(run.records),
        timeline.chart(run.records),
        hits.chart(run.records),
        link.chart(run.records, run.link, run.link_bytes_per_s),
        tokens.chart(run.records),
    ]
    body = el(
        "main",
        *(_head(run, title), *_notes(run), _tiles(run.summary), _times(run.summary)),
        *(_figure(chart) for chart in charts),
        *(_facts(run), *_counts(run.summary), _requests(run.records)),
    )
    tip = el("div", id="tip", role="tooltip", hidden="")
    script = el("script", Markup(looks.SCRIPT))
    return "<!doctype html>\n" + el("html", _meta(title), el("body", body, tip, script), lang="en") + "\n"


def _meta(title: str) -> Markup:
    """Its policy lets nothing be fetched, and no script run but this page's own."""
    own = base64.b64encode(hashlib.sha256(looks.SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{own}'"
    return el(
        "head",
        Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        el("title", title),
        el("style", Markup(looks.STYLE)),
    )


def _head(run: Run, title: str) -> Markup:
    command = el("p", el("code", run.command, id="command")) if run.command else NOTHING
    machine = el("p", f"On {run.machine}.", id="machine", class_="soft") if run.machine else NOTHING
    return joined(el("h1", title), command, machine)


def _notes(run: Run) -> list[Markup]:
    """What a reader must know before believing the figures."""
    summary = run.summary
    bad = [f"{summary.failed:,} of {summary.requests:,} requests failed"] if summary.failed else []
    bad += [f"{summary.wrong:,} of {summary.checked:,} compared answers were wrong"] if summary.wrong else []
    bad += [] if summary.ok else ["no request was answered whole"]
    notes = [WAN_NOTE] if run.link else []
    if summary.pace:
        notes.append(
            f"The engines are paced ({summary.pace}): accelerators are emulated, the maths is real. "
            f"{summary.steps_overrun:,} of {summary.steps:,} steps took longer than the pace allows."
        )
    said = [el("div", f"{line[0].upper()}{line[1:]}.", class_="note bad") for line in bad]
    said += [el("div", el("b", "Warning: "), text, class_="note") for text in run.warnings]
    return [*said, *(el("div", text, class_="note") for text in notes)]


def _tiles(summary: Summary) -> Markup:
    """The figures that are looked for first."""
    tiles = [(f"{summary.ok:,} / {summary.requests:,}", "requests whole")]
    for name in ("TTFT", "TPOT"):
        if (spread := summary.times_ms.get(name)) is not None:
            tiles.append(
                (f"{_short(spread.p50)} ms", f"{name} P50, P90 {_short(spread.p90)}, P99 {_short(spread.p99)}")
            )
    tiles.append((f"{summary.output_tokens_per_s:,.1f}", f"output tokens/s, {summary.requests_per_s:,.2f} requests/s"))
    if summary.goodput_per_s is not None:
        tiles.append((f"{summary.goodput_per_s:,.2f} /s", f"goodput, {summary.good_share or 0:.1%} kept the limits"))
    if summary.bcr is not None:
        tiles.append((f"{summary.bcr:.4f}", f"BCR at a cost of {summary.cost or 0:g}"))
    tiles.append((f"{summary.relay_share:.1%}", "of the tokens by relay decode"))
    return el(
        "div", *(el("div", el("b", big), el("span", small), class_="tile") for big, small in tiles), class_="tiles"
    )


def _short(ms: float) -> str:
    return f"{ms:,.{1 if ms < 100 else 0}f}"


def _times(summary: Summary) -> Markup:
    table = tables.times(summary) if summary.times_ms else el("div", "Nothing was measured.", class_="empty")
    says = "Of whole answers that were read without pauses, beyond the warm-up; the client's queue of all."
    return _section("times", "Times at the client", says, table)


def _figure(chart: Chart) -> Markup:
    entries = [el("li", el("i", class_=entry.kind), entry.name) for entry in chart.legend]
    legend = el("ul", *entries, class_="legend") if entries else NOTHING
    caption = el("figcaption", el("h2", chart.title), el("p", chart.says), legend)
    drawn = el("div", chart.drawn, class_="wide") if chart.drawn else el("div", chart.empty, class_="empty")
    return el("figure", caption, drawn, id=chart.name)


def _facts(run: Run) -> Markup:
    lines = figure_lines(run.summary) + conditions(run.summary)
    lines += [(name, str(value)) for name, value in run.facts.items() if name != "warnings" and value not in ("", None)]
    return _section("facts", "The run", "", tables.facts(lines))


HEADS = {
    "pipelines": ("Pipelines and why", "pipeline: reason", "No request told its pipeline."),
    "fallbacks": ("Fallbacks", "reason", "None."),
    "failures by leg": ("Failures by leg", "leg", "None."),
    "errors": ("Errors", "error", "None."),
    "hostile clients": ("Hostile clients", "manner", ""),
}


def _counts(summary: Summary) -> list[Markup]:
    sections = []
    for key, counts in counted(summary).items():
        title, what, empty = HEADS[key]
        name = key.replace(" ", "-")
        if counts:
            sections.append(_section(name, title, "", tables.counts(name, dict(counts), what)))
        elif empty:
            sections.append(_section(name, title, "", el("p", empty, class_="soft")))
    return sections


def _requests(records: Sequence[Record]) -> Markup:
    rows = timeline.sampled(sorted(records, key=lambda record: record.sent_s), MOST_REQUESTS)
    if not rows:
        return NOTHING
    some = f"{len(rows):,} of {len(records):,}, evenly chosen" if len(rows) < len(records) else f"all {len(rows):,}"
    says = el("p", f"A click on a column's head sorts by it ({some}).", class_="soft")
    return el("section", el("details", el("summary", "Requests"), says, tables.requests(rows)), id="requests")


def _section(name: str, title: str, says: str, *content: str) -> Markup:
    about = el("p", says, class_="soft") if says else NOTHING
    return el("section", el("h2", title), about, *content, id=name)
