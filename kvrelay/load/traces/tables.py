"""The traces that are CSV tables of times and lengths: Azure's, BurstGPT's, Splitwise's. Knows one line at a time."""

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from kvrelay.load.traces.row import Row, TraceError


def clock_s(text: str) -> float:
    """Of a date and time ("2023-11-16 18:17:03.9799600", with or without a zone). ValueError otherwise."""
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def seconds(text: str) -> float:
    """Of a number of seconds. ValueError otherwise."""
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{text!r} is no time in seconds")
    return value


def either(text: str) -> float:
    """A date and time, or a number of seconds."""
    try:
        return seconds(text)
    except ValueError:
        return clock_s(text)


@dataclass(frozen=True, slots=True)
class Table:
    """Which columns hold what."""

    at: str
    prompt: str
    output: str
    read_time: Callable[[str], float]


AZURE = Table("TIMESTAMP", "ContextTokens", "GeneratedTokens", clock_s)
BURSTGPT = Table("Timestamp", "Request tokens", "Response tokens", seconds)
SPLITWISE = (
    Table("arrival_timestamp", "prompt_size", "token_size", either),
    Table("TIMESTAMP", "ContextTokens", "GeneratedTokens", either),
)


def read(lines: Iterable[str], path: object, tables: Sequence[Table]) -> Iterator[Row]:
    """A row per line, by the first table whose columns the header has; TraceError at a line that is none.

    Requests without output (BurstGPT lists failed ones so) are passed over.
    """
    reader = csv.reader(lines)
    header = [name.strip().lstrip("\ufeff") for name in next(reader, [])]
    table = next((t for t in tables if {t.at, t.prompt, t.output} <= set(header)), None)
    if table is None:
        wanted = " or ".join(f"{t.at}, {t.prompt}, {t.output}" for t in tables)
        raise TraceError(path, 1, f"expected a header with {wanted}")
    places = [header.index(name) for name in (table.at, table.prompt, table.output)]
    while True:
        try:
            cells = next(reader)
            if not any(cell.strip() for cell in cells):
                continue
            row = _row(cells, places, len(header), table, reader.line_num)
        except StopIteration:
            return
        except (ValueError, csv.Error) as error:
            raise TraceError(path, reader.line_num, str(error)) from None
        if row.output_tokens:
            yield row


def _row(cells: list[str], places: list[int], width: int, table: Table, line: int) -> Row:
    if len(cells) != width:
        raise ValueError(f"{len(cells)} columns, the header has {width}")
    at, prompt, output = (cells[place] for place in places)
    try:
        at_s = table.read_time(at)
    except ValueError:
        raise ValueError(f"{table.at}: {at!r} is no time") from None
    return Row(at_s, _count(table.prompt, prompt, 1), _count(table.output, output, 0), (), line)


def _count(name: str, text: str, least: int) -> int:
    try:
        count = float(text)
    except ValueError:
        count = math.nan
    if not least <= count < math.inf or count != int(count):
        raise ValueError(f"{name}: {text!r} is no count of tokens")
    return int(count)
