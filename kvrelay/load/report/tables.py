"""Tables of a page. Knows elements; the figures are the summary's and the records'."""

from collections.abc import Iterable, Sequence

from kvrelay.load.record import Record
from kvrelay.load.report.markup import Markup, el, number
from kvrelay.load.report.terminal import TIME_COLUMNS, time_cells
from kvrelay.load.summary import Summary

Cell = str | float | None
"""A number is shown with its digits and sorts by its value; None: not known."""


def times(summary: Summary) -> Markup:
    """Every kind of time, ms."""
    rows = [
        el("tr", el("th", name), *(el("td", cell, class_="number") for cell in time_cells(spread)))
        for name, spread in summary.times_ms.items()
    ]
    heads = [el("th", "ms"), *(el("th", column, class_="number") for column in TIME_COLUMNS)]
    return _table(heads, rows, "times")


def facts(lines: Iterable[tuple[str, str]]) -> Markup:
    """(name, value)s; a line without a name belongs to the one before."""
    rows = [el("tr", el("th", name, scope="row"), el("td", value)) for name, value in lines]
    return el("table", el("tbody", *rows), class_="facts")


def counts(name: str, counted: dict[str, int], what: str) -> Markup:
    """How often each of something was."""
    rows = [_row([key, count]) for key, count in counted.items()]
    return _table([el("th", what), el("th", "requests", class_="number")], rows, f"sorts {name}")


REQUEST_COLUMNS = (
    "request", "outcome", "pipeline", "reason", "sent, s", "prompt", "tokens", "hit P, %", "hit MD, %", "TTFT, ms",
    "TTST, ms", "TPOT, ms", "longest gap, ms", "stall, ms", "E2EL, ms", "WAN, kB",
)  # fmt: skip
TEXTS = 4
"""Columns from the left."""


def requests(records: Sequence[Record]) -> Markup:
    """A line each."""
    heads = [el("th", name, class_=None if place < TEXTS else "number") for place, name in enumerate(REQUEST_COLUMNS)]
    return _table(heads, [_row(_cells(record)) for record in records], "sorts requests")


def _cells(record: Record) -> list[Cell]:
    return [
        f"{record.conversation} turn {record.turn}",
        f"{record.outcome}: {record.error}" if record.error else record.outcome,
        record.pipeline,
        record.reason,
        round(record.sent_s, 3),
        record.prompt_tokens,
        record.output_tokens,
        round(100 * record.hit_prefill, 1) if record.prefill else None,
        round(100 * record.hit_main, 1) if record.main or not record.pipeline else None,
        *(_ms(value) for value in (record.ttft_ms, record.ttst_ms, record.tpot_ms, record.max_gap_ms)),
        _ms(record.handoff_stall_ms),
        _ms(record.e2el_ms),
        round(record.wan_bytes / 1e3, 1),
    ]


def _ms(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _row(cells: Iterable[Cell]) -> Markup:
    return el("tr", *(_cell(cell) for cell in cells))


def _cell(cell: Cell) -> Markup:
    if cell is None:
        return el("td", class_="number")
    if isinstance(cell, str):
        return el("td", cell)
    return el("td", f"{cell:,}", class_="number", data_value=number(cell))


def _table(heads: Sequence[Markup], rows: Sequence[Markup], kind: str) -> Markup:
    table = el("table", el("thead", el("tr", *heads)), el("tbody", *rows), class_=kind)
    return el("div", table, class_="wide")
