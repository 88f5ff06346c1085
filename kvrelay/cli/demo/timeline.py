"""One request as bars over time, for a terminal and as a PNG. Knows an answer; asks nobody."""

from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from kvrelay.load.client import Answer

COLOURS = {"P": "#4c78a8", "KV": "#9e9e9e", "RLD": "#f58518", "hand-off": "#e45756", "MD": "#54a24b"}


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that took from start_ms to end_ms, since the request was sent."""

    label: str
    kind: str
    """A key of COLOURS."""
    start_ms: float
    end_ms: float
    ticks_ms: tuple[float, ...] = ()
    """When tokens came."""


def bars_of(answer: Answer) -> list[Bar]:
    """What can be told of an answer, in the order in which it began. Events are the router's, tokens the client's."""
    assert answer.completed is not None
    at = {event.name: event.at_ms for event in reversed(answer.completed.report.timeline)}
    came = {source: _came(answer, source) for source in ("prefill", "relay", "main")}
    first = came["prefill"][0] if came["prefill"] else answer.arrived_ms[0]
    began = at.get("prefill_started", 0.0)
    bars = [Bar("P computes", "P", began, first, (first,))]
    for event, label in (("relay_ready", "KV to RLD"), ("main_ready", "KV over the WAN")):
        if event in at:
            bars.append(Bar(label, "KV", began, at[event]))
    if came["relay"]:
        bars.append(Bar(f"RLD: {len(came['relay'])} tokens", "RLD", came["relay"][0], came["relay"][-1], came["relay"]))
    if came["relay"] and came["main"]:
        bars.append(Bar("hand-off", "hand-off", came["relay"][-1], came["main"][0]))
    if came["main"]:
        bars.append(Bar(f"MD: {len(came['main'])} tokens", "MD", came["main"][0], came["main"][-1], came["main"]))
    return bars


def _came(answer: Answer, source: str) -> tuple[float, ...]:
    return tuple(ms for ms, from_ in zip(answer.arrived_ms, answer.sources, strict=True) if from_ == source)


def draw(bars: list[Bar], title: str, width: int = 72) -> Table:
    """Bars of `width` characters for a terminal."""
    end = max(bar.end_ms for bar in bars)
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    for bar in bars:
        first = round(bar.start_ms / end * (width - 1))
        length = max(1, round(bar.end_ms / end * (width - 1)) - first + 1)
        line = Text(" " * first + "█" * length, style=COLOURS[bar.kind])
        line.pad_right(max(0, width - len(line)))
        table.add_row(bar.label, line, f"{bar.start_ms:,.0f} – {bar.end_ms:,.0f} ms")
    return table


def save(bars: list[Bar], title: str, path: Path) -> None:
    """The same as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.5 * len(bars) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, bar in enumerate(bars):
        span = [(bar.start_ms, max(bar.end_ms - bar.start_ms, 1.0))]
        axes.broken_barh(span, (row - 0.35, 0.7), color=COLOURS[bar.kind], alpha=0.55 if bar.ticks_ms else 0.9)
        axes.vlines(bar.ticks_ms, row - 0.35, row + 0.35, color=COLOURS[bar.kind], linewidth=1.2)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms since the request was sent; each line is a token at the client")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
