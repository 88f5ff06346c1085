"""A sweep as a table, as JSON and as lines of CSV."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from kvrelay.load.report.files import flatten
from kvrelay.load.sweep import Step, knee

COLUMNS = ("rate/s", "due", "in time", "good", "TTFT p50 ms", "p90", "p99", "E2EL p50 ms", "output tokens/s", "")


def sweep_table(steps: Sequence[Step]) -> Table:
    """A line a rate, rising; the knee is marked."""
    found = knee(steps)
    table = Table(*COLUMNS, title="sweep")
    for step in sorted(steps, key=lambda step: step.rate_per_s):
        times = (step.ttft.p50, step.ttft.p90, step.ttft.p99) if step.ttft else ()
        cells = [f"{value:,.1f}" for value in times] or ["", "", ""]
        e2el = f"{step.e2el.p50:,.1f}" if step.e2el else ""
        counts = (f"{step.rate_per_s:.3g}", str(step.requests), str(step.in_time), str(step.good))
        mark = "knee" if step is found else step.why_not
        table.add_row(*counts, *cells, e2el, f"{step.output_tokens_per_s:,.1f}", mark)
    for column in table.columns[:-1]:
        column.justify = "right"
    return table


def knee_line(steps: Sequence[Step]) -> str:
    """What a person reads last."""
    found = knee(steps)
    if found is None:
        return f"knee: below the lowest rate, {steps[0].rate_per_s:.3g}/s ({steps[0].why_not})"
    broken = [step.rate_per_s for step in steps if not step.carried]
    if not broken:
        return f"knee: not reached; {found.rate_per_s:.3g}/s, the highest rate tried, was carried"
    return f"knee: {found.rate_per_s:.3g}/s was carried, {min(broken):.3g}/s was not"


def write_json(steps: Sequence[Step], path: Path) -> None:
    """Blocking."""
    found = knee(steps)
    document = {"knee_per_s": found.rate_per_s if found else None, "steps": [asdict(step) for step in steps]}
    path.write_text(json.dumps(document, indent=2) + "\n")


def write_csv(steps: Sequence[Step], path: Path) -> None:
    """A line of names and a line a step, in the order they ran. Blocking."""
    rows = [dict(flatten(asdict(step))) for step in steps]
    names = list(dict.fromkeys(name for row in rows for name in row if row[name] is not None))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
