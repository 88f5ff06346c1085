"""`kvrelay load`: measures a router under load. The generator itself is in kvrelay/load/."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvrelay.cli import options as o
from kvrelay.cli.console import err, out, run
from kvrelay.load.arrival import Arrival, ClosedLoop, Poisson
from kvrelay.load.report import render, summarize, write_jsonl
from kvrelay.load.run import LoadRun, Record
from kvrelay.load.workload import HitRates, Lengths, SharedPrefixes, Workload
from kvrelay.proto.v1 import router_pb2, router_pb2_grpc
from kvrelay.rpc.channels import Purpose, open_channel


def load(
    router: o.Router = o.DEFAULT_ROUTER,
    conversations: Annotated[int, typer.Option("--conversations", "-n")] = 20,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", help="Closed loop: clients.")] = 4,
    rate: Annotated[float, typer.Option(help="Poisson instead: starts a second.", min=0.0, metavar="HZ")] = 0.0,
    hits: Annotated[str, typer.Option(help="First prompts' hit rates: RATE:WEIGHT,...")] = "0.97:75,0.8:20,0:5",
    prompt_tokens: Annotated[str, typer.Option(help="Of first prompts: N or LOW-HIGH.")] = "128-512",
    output_tokens: Annotated[str, typer.Option(help="N or LOW-HIGH.")] = "16-64",
    documents: Annotated[int, typer.Option(help="That prompts share.", min=1, metavar="N")] = 4,
    turns: Annotated[int, typer.Option(help="Requests a conversation.", min=1, metavar="N")] = 1,
    turn_tokens: Annotated[str, typer.Option(help="New ids of a later turn.")] = "16-64",
    temperature: o.Temperature = None,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.")] = 1,
    jsonl: Annotated[Path | None, typer.Option(help="Write one record a request.", dir_okay=False)] = None,
    warm_up: Annotated[bool, typer.Option(help="Send the documents first.")] = True,
    pipeline: o.Forced = None,
    handoff_mode: o.Handoff = None,
    cache_salt: o.Salt = "",
    timeout: o.Timeout = 300.0,
) -> None:
    """Ask many prompts that share prefixes; show times, pipelines, tokens by stage. Exit code 1 if any failed."""
    template = router_pb2.GenerateRequest(return_text=False, cache_salt=cache_salt)
    template.sampling.CopyFrom(o.sampling(temperature=temperature, ignore_eos=True))
    o.forced(template, pipeline, handoff_mode)
    try:
        wanted = Wanted(
            count=conversations,
            hits=HitRates.parse(hits),
            prompt_tokens=Lengths.parse(prompt_tokens),
            output_tokens=Lengths.parse(output_tokens),
            turn_tokens=Lengths.parse(turn_tokens),
            documents=documents,
            turns=turns,
            seed=seed,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    arrival: Arrival = Poisson(rate, seed) if rate else ClosedLoop(concurrency)
    run(_load(router, template, wanted, arrival, warm_up, timeout, jsonl))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A workload, but for what only the fleet knows."""

    count: int
    hits: HitRates
    prompt_tokens: Lengths
    output_tokens: Lengths
    turn_tokens: Lengths
    documents: int
    turns: int
    seed: int

    def workload(self, vocab_size: int) -> SharedPrefixes:
        """With ids of this vocabulary."""
        return SharedPrefixes(
            seed=self.seed,
            vocab_size=vocab_size,
            count=self.count,
            hits=self.hits,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            documents=self.documents,
            turns=self.turns,
            turn_tokens=self.turn_tokens,
        )


async def _load(
    address: str,
    template: router_pb2.GenerateRequest,
    wanted: Wanted,
    arrival: Arrival,
    warm_up: bool,
    timeout_s: float,
    jsonl: Path | None,
) -> int:
    async with open_channel(address, Purpose.TOKENS) as channel:
        router = router_pb2_grpc.RouterServiceStub(channel)
        fleet = await router.GetFleet(router_pb2.GetFleetRequest(), timeout=10.0)
        workload: Workload = wanted.workload(next((stage.info.vocab_size for stage in fleet.stages), 256))
        with _progress(wanted.count * wanted.turns) as observe:
            load_run = LoadRun(router, template, timeout_s=timeout_s, observe=observe)
            unwarm = await load_run.warm_up(workload.warm_up()) if warm_up else []
            await load_run.measure(workload.conversations(), arrival)
    for error in unwarm:
        err.print(f"[yellow]warm-up:[/yellow] {error}", soft_wrap=True)
    summary = summarize(load_run.records, load_run.wall_s)
    out.print(render(summary))
    if any(stage.info.pace for stage in fleet.stages):
        overran = sum(stage.load.steps_overrun for stage in fleet.stages)
        out.print(f"The engines are paced (emulated accelerators); {overran} steps had overrun before this run.")
    if jsonl is not None:
        write_jsonl(load_run.records, jsonl)
    return 1 if summary.failed or not summary.requests else 0


@contextlib.contextmanager
def _progress(total: int) -> Iterator["Board"]:
    bar = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*bar, TextColumn("{task.description}"), console=err) as progress:
        yield Board(progress, total)


class Board:
    """The progress line of a run: requests ended, the mean TTFT so far, failures."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("warming up", total=total)
        self._ttft_ms: list[float] = []
        self._failed = 0

    def __call__(self, record: Record) -> None:
        """One more request has ended."""
        self._failed += not record.ok
        self._ttft_ms += [record.ttft_ms] if record.ttft_ms is not None else []
        mean = sum(self._ttft_ms) / len(self._ttft_ms) if self._ttft_ms else 0.0
        self._progress.update(self._task, advance=1, description=f"TTFT {mean:,.0f} ms mean, {self._failed} failed")
