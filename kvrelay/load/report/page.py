"""A run as one HTML page that needs nothing else: no network, no other file. Pure; computes no new figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from kvrelay.load.record import Record
from kvrelay.load.report.terminal import TIME_COLUMNS, fact_lines, time_cells
from kvrelay.load.summary import Summary
from kvrelay.load.surroundings import LinkSample


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
    times = "".join(_row(name, *time_cells(spread)) for name, spread in run.summary.times_ms.items())
    facts = "".join(_row(name, value) for name, value in fact_lines(run.summary))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title></head><body>'
        f"<h1>{escape(title)}</h1><p><code>{escape(run.command)}</code></p><p>{escape(run.machine)}</p>"
        f"<table>{_row('ms', *TIME_COLUMNS)}{times}</table><table>{facts}</table></body></html>\n"
    )


def _row(*cells: str) -> str:
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
