"""How an experiment tells what it found: a table, a picture, JSON; each says what was emulated. Knows no experiment."""

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot, ticker
from rich.console import Console
from rich.table import Table

from bench.figures import Figure, cells
from bench.rig import EMULATED

matplotlib.use("Agg")
RESULTS = Path("bench/results")


@dataclass(slots=True)
class Report:
    """One experiment's result."""

    name: str
    quick: bool
    settings: dict[str, Any]
    emulated: str = EMULATED
    figures: dict[str, Figure] = field(default_factory=dict)
    tables: list[tuple[str, list[str], list[list[str]]]] = field(default_factory=list)
    """(title, columns, rows)."""
    data: dict[str, Any] = field(default_factory=dict)
    invalid: list[str] = field(default_factory=list)
    """Why the figures must not be believed; empty: valid."""
    repeated: list[str] = field(default_factory=list)
    """Runs that were thrown away and made again, and why."""
    pictures: list[str] = field(default_factory=list)
    interval: str = "interval"
    """What kind, where `emulated` does not say it."""
    module: str = ""
    """Of bench, that makes it; empty: as `name`."""

    def finish(self, out: Path) -> int:
        """Prints, writes <out>/<name>.json, and returns the exit code: 1 for an invalid run."""
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{self.name}.json").write_text(json.dumps(self.json(), indent=1, default=str) + "\n")
        console = Console(width=120)
        for title, columns, rows in [self._figure_table(), *self.tables]:
            table = Table(*columns, title=title)
            for row in rows:
                table.add_row(*row)
            console.print(table)
        console.print(self.emulated)
        for run in self.repeated:
            console.print(f"run again: {run}", soft_wrap=True)
        for problem in self.invalid:
            console.print(f"[red]INVALID RUN:[/red] {problem}", soft_wrap=True)
        return 1 if self.invalid else 0

    def json(self) -> dict[str, Any]:
        """Everything."""
        return {
            "bench": self.name,
            "valid": not self.invalid,
            "invalid": self.invalid,
            "repeated": self.repeated,
            "quick": self.quick,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "command": " ".join(["python -m", f"bench.{self.module or self.name}", *sys.argv[1:]]),
            "emulated": self.emulated,
            "settings": self.settings,
            "interval": self.interval,
            "figures": {name: figure.json() for name, figure in self.figures.items()},
            "data": self.data,
            "pictures": self.pictures,
        }

    def _figure_table(self) -> tuple[str, list[str], list[list[str]]]:
        rows = [[name, *cells(figure.json())] for name, figure in self.figures.items()]
        return f"bench.{self.name}", ["figure", "value", self.interval, "target", ""], rows


def machine() -> dict[str, Any]:
    """Where it ran, and how busy that was."""
    load = [round(x, 2) for x in os.getloadavg()]
    return {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "load": load}


def arguments(about: str | None) -> argparse.ArgumentParser:
    """What every experiment takes."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="short: shows that it works, its figures are rough")
    parser.add_argument("--out", type=Path, default=RESULTS / "latest", help="folder of JSON and pictures")
    return parser


def curves(
    path: Path,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x: str,
    y: str,
    *,
    log: bool = False,
    title: str = "",
) -> str:
    """Lines as a PNG; the picture too says what was emulated. Returns its file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for label, (xs, ys) in series.items():
        axes.plot(xs, ys, marker="." if len(xs) < 40 else None, label=label)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,g}"))
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(title or "paced engines, emulated WAN, one host", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path.name
