"""What a `kvrelay load` writes at its end: which files, and what they say beside the figures. Blocking."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.cli.load import sweep_table
from kvrelay.load.record import Record
from kvrelay.load.report import files
from kvrelay.load.report.machine import machine
from kvrelay.load.report.page import Run, page
from kvrelay.load.summary import Summary
from kvrelay.load.surroundings import Watch
from kvrelay.load.sweep import Step
from kvrelay.load.worth import Prices, Slo


@dataclass(frozen=True, slots=True)
class Shown:
    """What is computed and written at the end."""

    slo: Slo | None = None
    prices: Prices | None = None
    jsonl: Path | None = None
    json: Path | None = None
    csv: Path | None = None
    html: Path | None = None
    command: str = ""
    """The command line, as the page shows it."""

    def refuse_nonsense(self) -> None:
        """ValueError: a file could not be written at the end of the run."""
        flags = {"--jsonl": self.jsonl, "--summary-json": self.json, "--summary-csv": self.csv, "--html": self.html}
        for flag, path in flags.items():
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{flag} {path}: there is no directory {path.parent}")

    def write(
        self,
        summary: Summary,
        records: Sequence[Record],
        facts: dict[str, Any],
        warnings: Sequence[str],
        seen: Watch,
    ) -> None:
        """Of one run. OSError."""
        told = {**facts, "warnings": "; ".join(warnings)}
        if self.jsonl is not None:
            files.write_jsonl(records, self.jsonl)
        if self.json is not None:
            files.write_json(summary, told, self.json)
        if self.csv is not None:
            files.write_csv(summary, told, self.csv)
        if self.html is not None:
            run = Run(
                summary, records, facts, warnings, self.command, machine(), seen.samples, seen.rate_bytes_per_s
            )  # fmt: skip
            self.html.write_text(page(run, f"kvrelay load: {facts['workload']}"), encoding="utf-8")

    def write_sweep(self, steps: Sequence[Step], records: Sequence[Record]) -> None:
        """Of a sweep: the summary is its steps. OSError."""
        if self.jsonl is not None:
            files.write_jsonl(records, self.jsonl)
        if self.json is not None:
            sweep_table.write_json(steps, self.json)
        if self.csv is not None:
            sweep_table.write_csv(steps, self.csv)
