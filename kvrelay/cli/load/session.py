"""One `kvrelay load`, from what was asked for to its exit code. Knows the order of things."""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.markup import escape

from kvrelay.cli.console import err, out
from kvrelay.cli.load.board import progress
from kvrelay.cli.load.flags import WorkloadKind
from kvrelay.cli.load.wanted import Made, Said
from kvrelay.load.arrival import Arrival
from kvrelay.load.hostile import Hostility
from kvrelay.load.record import Record
from kvrelay.load.report import files
from kvrelay.load.report.terminal import render
from kvrelay.load.run import LoadOptions, LoadRun, Observer
from kvrelay.load.shards import ShardsResult, run_shards
from kvrelay.load.summary import Summary, summarise
from kvrelay.load.surroundings import Watch, watch
from kvrelay.load.target import RouterTarget
from kvrelay.load.worth import Prices, Slo


@dataclass(frozen=True, slots=True)
class Shown:
    """What is computed and written at the end."""

    slo: Slo | None
    prices: Prices | None
    jsonl: Path | None
    json: Path | None
    csv: Path | None

    @property
    def paths(self) -> list[Path]:
        """Of the files."""
        return [path for path in (self.jsonl, self.json, self.csv) if path is not None]


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that the command line asks for."""

    router: str
    wan: str
    connections: int
    template: bytes
    said: Said
    arrival: Arrival
    duration_s: float | None
    grace_s: float
    timeout_s: float
    warm_caches: bool
    warm_up_s: float
    most_in_flight: int | None
    processes: int
    hostility: Hostility
    shown: Shown

    def refuse_nonsense(self) -> None:
        """ValueError: flags that do not go together, before anything is sent."""
        if self.said.kind is not WorkloadKind.TRACE:
            self.said.workload(256, None)
        if not self.said.count and self.duration_s is None and self.said.kind is not WorkloadKind.TRACE:
            raise ValueError("-n 0 (endless) needs --duration")
        rates = self.hostility
        if rates.cancel_rate + rates.slow_rate + rates.probe_rate > 1:
            raise ValueError("the shares of hostile clients add up to more than 1")
        for path in self.shown.paths:
            if not path.parent.is_dir():
                raise ValueError(f"{path}: there is no directory {path.parent}")

    async def run(self) -> int:
        """-> the exit code: 1 if anything failed, was wrong, or nothing was asked."""
        async with watch(self.router, self.wan or None) as seen:
            made = await asyncio.to_thread(self._made, seen)
            if made.note:
                err.print(f"[yellow]{escape(made.note)}[/yellow]", soft_wrap=True)
            with progress(made.requests) as board:
                done = await measure(self._options(made), board)
        for error in done.warm_up_errors:
            err.print(f"[yellow]warm-up:[/yellow] {escape(error)}", soft_wrap=True)
        records = done.records
        around = seen.around(done.cpu_share)
        summary = summarise(records, None, slo=self.shown.slo, prices=self.shown.prices, around=around)
        out.print(render(summary))
        await asyncio.to_thread(self._write, summary, records)
        return exit_code(summary)

    def _made(self, seen: Watch) -> Made:
        stages = [stage.info for stage in seen.before.stages]
        vocab_size = min((s.vocab_size for s in stages), default=256)
        try:
            return self.said.workload(vocab_size, min((s.max_model_tokens for s in stages), default=None))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def _options(self, made: Made) -> LoadOptions:
        return LoadOptions(
            target=RouterTarget(self.router, self.template, self.connections),
            workload=made.workload,
            arrival=self.arrival,
            warm_caches=self.warm_caches,
            warm_up_s=self.warm_up_s,
            duration_s=self.duration_s,
            grace_s=self.grace_s,
            timeout_s=self.timeout_s,
            most_in_flight=self.most_in_flight,
            hostility=self.hostility,
            processes=self.processes,
        )

    def _write(self, summary: Summary, records: list[Record]) -> None:
        facts: dict[str, Any] = {
            "target": self.router,
            "workload": str(self.said.kind),
            "arrival": repr(self.arrival),
            "seed": self.said.seed,
        }
        if self.shown.jsonl is not None:
            files.write_jsonl(records, self.shown.jsonl)
        if self.shown.json is not None:
            files.write_json(summary, facts, self.shown.json)
        if self.shown.csv is not None:
            files.write_csv(summary, facts, self.shown.csv)


async def measure(options: LoadOptions, observe: Observer) -> ShardsResult:
    """Warms up and runs, here or in processes."""
    if options.processes > 1:
        return await run_shards(options, observe)
    async with contextlib.AsyncExitStack() as stack:
        target = await stack.enter_async_context(options.target.open())
        run = LoadRun(options, target, observe)
        errors = await run.warm_up() if options.warm_caches else []
        await run.measure()
    return ShardsResult(run.records, run.wall_s, run.cpu_share, errors)


def exit_code(summary: Summary) -> int:
    """0 if every counted answer is whole and none is wrong; unfinished and cancelled ones are not failures."""
    return 1 if summary.failed or summary.wrong or not summary.ok else 0
