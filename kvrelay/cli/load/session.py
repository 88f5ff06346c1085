"""One `kvrelay load`, from what was asked for to its exit code. Knows the order of things."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import typer
from rich.markup import escape

from kvrelay.cli.console import err, out
from kvrelay.cli.load.board import progress
from kvrelay.cli.load.check import compared
from kvrelay.cli.load.flags import WorkloadKind
from kvrelay.cli.load.shown import Shown
from kvrelay.cli.load.sweep_table import knee_line, sweep_table
from kvrelay.cli.load.wanted import Made, Said
from kvrelay.cli.load.whom import Whom
from kvrelay.load.arrival import Arrival
from kvrelay.load.hostile import Hostility
from kvrelay.load.record import Record
from kvrelay.load.report.terminal import render
from kvrelay.load.run import LoadOptions, LoadRun, Observer
from kvrelay.load.shards import ShardsResult, run_shards
from kvrelay.load.strain import strain
from kvrelay.load.summary import summarise
from kvrelay.load.surroundings import Watch, watch
from kvrelay.load.sweep import Search, Step, sweep


@dataclass(frozen=True, slots=True)
class Session:
    """Everything that the command line asks for."""

    whom: Whom
    said: Said
    arrival: Arrival
    search: Search | None
    """For the knee, instead of one run with `arrival`."""
    duration_s: float | None
    grace_s: float
    timeout_s: float
    warm_caches: bool
    warm_up_s: float
    most_in_flight: int | None
    processes: int
    hostility: Hostility
    check_limit: int
    """Answers to be compared with one engine's; 0: none."""
    shown: Shown

    def refuse_nonsense(self) -> None:
        """ValueError: flags that do not go together, before anything is sent."""
        self.whom.refuse_nonsense()
        traced = self.said.kind is WorkloadKind.TRACE
        if not traced:
            self.said.workload(256, None)
        elif self.said.trace is None or not self.said.trace.is_file():
            raise ValueError(f"--trace {self.said.trace or 'FILE'}: there is no such file to replay")
        if not self.said.count and self.duration_s is None and not traced:
            raise ValueError("-n 0 (endless) needs --duration")
        if self.said.cut.end_s is not None and self.said.cut.end_s <= self.said.cut.start_s:
            raise ValueError(f"--end {self.said.cut.end_s:g}: expected more than --start {self.said.cut.start_s:g}")
        rates = self.hostility
        if rates.cancel_rate + rates.slow_rate + rates.probe_rate > 1:
            raise ValueError("--cancel-rate, --slow-rate and --probe-rate add up to more than 1")
        if self.check_limit and self.whom.against:
            raise ValueError("--check compares with an engine of the fleet's model; it cannot go with --against")
        if self.check_limit and self.search:
            raise ValueError("--check compares the answers of one run; it cannot go with a sweep")
        if self.shown.html is not None and self.search:
            raise ValueError("--html shows one run; it cannot go with a sweep")
        self.shown.refuse_nonsense()

    async def run(self) -> int:
        """-> the exit code: 1 if anything failed, was wrong, or nothing was asked."""
        if self.search is not None:
            return await self._swept(self.search)
        async with watch(*self.whom.watched) as seen:
            made = await asyncio.to_thread(self._made, self.said, seen)
            if made.note:
                err.print(f"[yellow]{escape(made.note)}[/yellow]", soft_wrap=True)
            with progress(made.requests) as board:
                done = await measure(self._options(made), board)
        records = await self._checked(done.records, seen)
        summary = summarise(
            records, None, slo=self.shown.slo, prices=self.shown.prices, around=seen.around(done.cpu_share)
        )
        out.print(render(summary))
        warnings = [f"warm-up: {error}" for error in done.warm_up_errors]
        warnings += strain(records, done.cpu_share, queues=self.most_in_flight is not None)
        warn(warnings)
        await asyncio.to_thread(self.shown.write, summary, records, self._facts, warnings, seen)
        return exit_code(records)

    async def _checked(self, records: list[Record], seen: Watch) -> list[Record]:
        """With verdicts, if they were asked for. A fleet without a stage has answered nothing."""
        if not self.check_limit or not seen.before.stages:
            return records
        return await compared(records, seen.before.stages[0].info, self.whom.template, self.check_limit)

    async def _swept(self, search: Search) -> int:
        """-> the exit code: 1 if there is no knee, or a request failed at a rate that was carried.

        Overload is what a sweep looks for: what fails then is no fault.
        """
        busiest, warnings = 0.0, list[str]()

        async def ran(options: LoadOptions) -> list[Record]:
            nonlocal busiest
            done = await measure(options, board)
            busiest = max(busiest, done.cpu_share)
            warnings.extend(f"warm-up: {error}" for error in done.warm_up_errors)
            return done.records

        async with watch(*self.whom.watched) as seen:
            made = await asyncio.to_thread(self._made, replace(self.said, count=0), seen)
            with progress(0) as board:
                options = self._options(made)
                steps, runs = await sweep(options, search, self.shown.slo, self.said.seed, ran, told)
        records = [record for run in runs for record in run]
        out.print(sweep_table(steps))
        out.print(knee_line(steps))
        warnings += strain(records, busiest, queues=self.most_in_flight is not None)
        warn(warnings)
        await asyncio.to_thread(self.shown.write_sweep, steps, records)
        carried = [record for step, run in zip(steps, runs, strict=True) if step.carried for record in run]
        return exit_code(carried)

    def _made(self, said: Said, seen: Watch) -> Made:
        try:
            return said.workload(*self.whom.room(seen.before))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    def _options(self, made: Made) -> LoadOptions:
        return LoadOptions(
            target=self.whom.target,
            workload=made.workload,
            arrival=self.arrival,
            warm_caches=self.warm_caches,
            warm_up_s=self.warm_up_s,
            duration_s=self.duration_s,
            grace_s=self.grace_s,
            timeout_s=self.timeout_s,
            most_in_flight=self.most_in_flight,
            hostility=self.hostility,
            keep_ids=bool(self.check_limit),
            processes=self.processes,
        )

    @property
    def _facts(self) -> dict[str, Any]:
        return {
            "target": self.whom.name,
            "workload": str(self.said.kind),
            "arrival": repr(self.arrival),
            "seed": self.said.seed,
            "processes": self.processes,
        }


def warn(warnings: list[str]) -> None:
    """Each on a line of its own."""
    for text in warnings:
        err.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True)


def told(step: Step) -> None:
    """A line when a step of a sweep has ended."""
    how = "carried" if step.carried else f"not carried: {step.why_not}"
    err.print(f"{step.rate_per_s:.3g}/s, {step.requests} requests: {how}", soft_wrap=True)


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


def exit_code(records: Sequence[Record]) -> int:
    """1 if any failed or was wrong, or none is whole; unfinished and cancelled ones are not failures."""
    bad = any(record.outcome == "failed" or record.matches is False for record in records)
    return 1 if bad or not any(record.ok for record in records) else 0
