"""Every request as a row of bars over the run's time: who kept its client waiting, who streamed."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from kvrelay.load.record import SOURCES, Record
from kvrelay.load.report.markup import Markup, el
from kvrelay.load.report.plot import BOTTOM, TOP, Chart, Entry, Plot, across, rect
from kvrelay.load.report.scale import Scale

MOST_ROWS = 300
LEAST_ROWS = 6
"""Of fewer, the rest is left empty."""
ROW_PX = (3.0, 18.0)
"""Lowest and highest row."""
WANTED_PX = 420.0
KINDS = {
    "queue": "waits in this client",
    "prefill": "until the first token",
    "wait": "after it, waits for KV at MD",
    "relay": "relay decode",
    "handoff": "hand-off",
    "main": "main decode",
    "server": "server",
}
FAILED = "failed, cancelled or unfinished"


@dataclass(frozen=True, slots=True)
class Segment:
    """Of a request; seconds since the run began."""

    kind: str
    """A key of KINDS."""
    start_s: float
    end_s: float


def chart(records: Sequence[Record]) -> Chart:
    """Of all, or of MOST_ROWS."""
    name, title = "timeline", "Timeline of requests"
    rows = sampled(sorted(records, key=lambda record: record.sent_s), MOST_ROWS)
    says = "A row a request, in the order in which they were sent"
    says += f"; {len(rows)} of {len(records):,}, evenly chosen." if len(rows) < len(records) else "."
    if any(record.warm_up for record in rows):
        says += " Pale: of the warm-up, which counts in no figure."
    if not rows:
        return Chart(name, title, says, empty="No request was sent.")
    drawn = [(record, segments(record)) for record in rows]
    kinds = {segment.kind for _, parts in drawn for segment in parts}
    legend = [Entry(kind, said) for kind, said in KINDS.items() if kind in kinds]
    legend += [Entry("failed", FAILED)] if any(not record.ok for record in rows) else []
    return Chart(name, title, says, _plot(drawn).drawn(name, title, says), legend=legend)


def sampled(records: Sequence[Record], most: int) -> list[Record]:
    """At most `most` of them, evenly."""
    if len(records) <= most:
        return list(records)
    return [records[place * len(records) // most] for place in range(most)]


def segments(record: Record) -> list[Segment]:
    """In order and without holes, from when it was due to its last token, or to its end if that was no answer."""
    sent_s = record.sent_s
    parts = [Segment("queue", min(record.due_s, sent_s), sent_s)]
    runs = [(letter, [at for _, at in run]) for letter, run in groupby(_tokens(record), key=lambda token: token[0])]
    if not runs:
        return [*parts, Segment("prefill", sent_s, sent_s + record.e2el_ms / 1e3)]
    now_s, before = sent_s + runs[0][1][0], ""
    parts.append(Segment("prefill", sent_s, now_s))
    for letter, came in runs:
        kind = {"p": "prefill"}.get(letter, SOURCES[letter])
        begins_s, ends_s = sent_s + came[0], sent_s + came[-1]
        if before:
            parts.append(Segment(_between(before, letter), now_s, begins_s))
        parts.append(Segment(kind, begins_s, ends_s))
        now_s, before = ends_s, letter
    return [part for part in parts if part.end_s > part.start_s]


def _tokens(record: Record) -> list[tuple[str, float]]:
    """(letter of its source, seconds since it was sent) by token."""
    return [(letter, at / 1e3) for letter, at in zip(record.sources, record.arrived_ms, strict=False)]


def _between(before: str, after: str) -> str:
    """Of whom a pause between two kinds of tokens is."""
    if before + after == "rm":
        return "handoff"
    return "wait" if before + after == "pm" else SOURCES[after]


def _plot(drawn: Sequence[tuple[Record, list[Segment]]]) -> Plot:
    row_px = min(ROW_PX[1], max(ROW_PX[0], WANTED_PX / len(drawn)))
    rows = max(len(drawn), LEAST_ROWS)
    height = TOP + BOTTOM + row_px * rows
    starts = [min(record.due_s, record.sent_s) for record, _ in drawn]
    ends = [record.sent_s + record.e2el_ms / 1e3 for record, _ in drawn]
    low, high = min(0.0, *starts), max(*ends, *(part.end_s for _, parts in drawn for part in parts), 1e-3)
    y = Scale(0, rows, TOP, TOP + row_px * rows)
    plot = Plot(across(low, high), y, "time since the run began (s)", "requests, as sent", height)
    for row, (record, parts) in enumerate(drawn):
        plot.add(_row(plot, row, row_px, record, parts))
    return plot


def _row(plot: Plot, row: int, row_px: float, record: Record, parts: Sequence[Segment]) -> Markup:
    top, height = plot.y(row), row_px
    marks = [rect(plot.x.start, top, plot.x.end - plot.x.start, height, class_="ground")]
    gap = 0.12 * height if height > 5 else 0.0
    for part in parts:
        left, right = plot.x(part.start_s), plot.x(part.end_s)
        marks.append(rect(left, top + gap, max(0.4, right - left), height - 2 * gap, class_=f"bar {part.kind}"))
    if not record.ok:
        end = plot.x(record.sent_s + record.e2el_ms / 1e3)
        marks.append(rect(end - 1, top, 3, height, class_="bar failed"))
    return el("g", *marks, class_="row pale" if record.warm_up else "row", data_tip=tip(record))


def tip(record: Record) -> str:
    """What is known of a request, for a pointer; lines."""
    tokens = ", ".join(f"{n} {source}" for source in SOURCES.values() if (n := record.tokens(source)))
    ttft = "no token" if record.ttft_ms is None else f"first token {record.ttft_ms:,.0f} ms"
    stall = "" if record.handoff_stall_ms is None else f", hand-off stall {record.handoff_stall_ms:,.0f} ms"
    lines = [
        f"{record.conversation} turn {record.turn}  {record.request_id}",
        f"{record.outcome}: {record.error}" if record.error else record.outcome,
        f"{record.pipeline}: {record.reason}" if record.pipeline else "",
        f"sent at {record.sent_s:,.2f} s, queue {record.queue_ms:,.0f} ms, {ttft}{stall}, end {record.e2el_ms:,.0f} ms",
        f"prompt {record.prompt_tokens:,}, hit at P {record.hit_prefill:.0%}, at MD {record.hit_main:.0%}",
        f"tokens: {tokens}" if tokens else "",
    ]
    return "\n".join(line for line in lines if line)
