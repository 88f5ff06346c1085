"""A run as files: a line per request, the summary as JSON, or as a line of CSV. Blocking: call it in a thread."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvrelay.load.record import Record
from kvrelay.load.summary import Summary


def write_jsonl(records: Iterable[Record], path: Path) -> None:
    """One record a line, in order of their ends."""
    with path.open("w") as file:
        for record in records:
            file.write(json.dumps(record.line()) + "\n")


def read_jsonl(path: Path) -> list[Record]:
    """The records of such a file."""
    with path.open() as file:
        return [Record.of_line(json.loads(line)) for line in file]


def write_json(summary: Summary, facts: Mapping[str, Any], path: Path) -> None:
    """The summary, with what else is known of the run."""
    path.write_text(json.dumps({**facts, **summary.document()}, indent=2) + "\n")


def write_csv(summary: Summary, facts: Mapping[str, Any], path: Path) -> None:
    """A line of names and a line of values; a nested value is named "outer.inner"."""
    flat = dict(flatten({**facts, **summary.document()}))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(flat))
        writer.writeheader()
        writer.writerow(flat)


def flatten(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of every leaf."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
