"""`kvrelay demo`, in its order: start, ask, stop, compare, report. Knows the others of this folder."""

import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvrelay.cli import options as o
from kvrelay.cli.board import ProcessBoard
from kvrelay.cli.cluster import cluster
from kvrelay.cli.console import out, run
from kvrelay.cli.demo import timeline
from kvrelay.cli.demo.asking import Asked, ask_all
from kvrelay.cli.demo.chats import CHATS, Chat
from kvrelay.cli.demo.reference import check_all
from kvrelay.cli.demo.report import row_of, table_of
from kvrelay.cli.demo.verdict import Verdict
from kvrelay.cli.spec import ClusterSpec
from kvrelay.load.client import Answer

STALL_MS = 1500
"""What this demo lets KV be late behind the first token before a relay is used: the WAN is a slow one."""


def demo(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a directory, or a .gguf file.")] = "smollm2",
    wan_rate: o.WanRate = "40mbit",
    wan_delay_ms: o.WanDelay = 20.0,
    report: Annotated[Path, typer.Option(help="JSON.", dir_okay=False)] = Path("demo-report.json"),
    picture: Annotated[Path, typer.Option(help="PNG.", dir_okay=False)] = Path("demo-timeline.png"),
    log_dir: Annotated[Path, typer.Option(help="One file a process.")] = Path("kvrelay-logs"),
) -> None:
    """Chat with a real model through all three kinds of stage over an emulated WAN; compare with one engine.

    Exit code 1 if an answer fails or differs from the reference.
    """
    spec = ClusterSpec(
        model=model,
        wan_rate=wan_rate,
        wan_delay_ms=wan_delay_ms,
        router_port=0,
        router_set=(("stall_ms", str(STALL_MS)),),
        log_dir=log_dir,
    )
    run(_demo(spec, report, picture))


async def _demo(spec: ClusterSpec, report: Path, picture: Path) -> int:
    began = time.monotonic()
    out.print(f"[bold]kvrelay demo[/bold]: {spec.model} through 1 prefill, 1 relay-decode and 1 main-decode stage.")
    out.print(f"[bold]The WAN is emulated[/bold] on this host: {note(spec)['wan']}.")
    asked = await _serve(spec)
    verdicts = await _compare(spec, asked)
    rows = [row_of(one, verdict) for one, verdict in zip(asked, verdicts, strict=True)]
    out.print(table_of(asked, rows))
    await asyncio.to_thread(_write, report, {"emulation": note(spec), "requests": rows})
    _show_timeline(asked, rows, picture)
    out.print(f"{report} and {picture} written, {time.monotonic() - began:.0f} s in all.", soft_wrap=True)
    return _judge(asked, rows)


async def _serve(spec: ClusterSpec) -> list[Asked]:
    """All chats at once, through processes that live as long as this call."""
    with ProcessBoard(out) as board:
        async with cluster(spec, board.changed) as running:
            board.close()
            out.print(f"{len(CHATS)} chats at once, {len(CHATS[0].turns)} turns each, one system prompt:")
            with _progress() as progress:
                return await ask_all(running.router_address, CHATS, ChatBoard(progress, CHATS))


async def _compare(spec: ClusterSpec, asked: Sequence[Asked]) -> list[Verdict]:
    out.print("Now the same requests to one engine, one at a time, for comparison:")
    with _progress() as progress:
        task = progress.add_task("reference", total=len(asked), state="")
        return await check_all(spec.model, spec.dtype, asked, lambda: progress.advance(task))


def _progress() -> Progress:
    name, state = TextColumn("{task.description:12}"), TextColumn("{task.fields[state]}")
    return Progress(name, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), state, console=out)


class ChatBoard:
    """A progress line per chat: tokens so far, and what is going on."""

    def __init__(self, progress: Progress, chats: Sequence[Chat]) -> None:
        self._progress = progress
        self._tasks: dict[str, TaskID] = {}
        self._before: dict[tuple[str, int], int] = {}
        for chat in chats:
            most = [turn.sampling.max_tokens for turn in chat.turns]
            self._tasks[chat.name] = progress.add_task(chat.name, total=sum(most), state="prefill")
            for number in range(1, len(most) + 1):
                self._before[chat.name, number] = sum(most[: number - 1])

    def __call__(self, chat: Chat, turn: int, answer: Answer) -> None:
        """A message of a stream came."""
        stage = answer.sources[-1] if answer.sources else "prefill"
        ended = answer.completed is not None
        done = self._before[chat.name, turn] + (chat.turns[turn - 1].sampling.max_tokens if ended else len(answer.ids))
        state = f"turn {turn}: {'done' if ended else stage}"
        self._progress.update(self._tasks[chat.name], completed=done, state=state)


def note(spec: ClusterSpec) -> dict[str, Any]:
    """What is not real in this demo, for people and for the report."""
    return {
        "wan": f"{spec.wan_rate} each way, {spec.wan_delay_ms:g} ms one way; a TCP relay, so loss, slow start and "
        "congestion control are not emulated",
        "host": f"all processes share {os.cpu_count()} CPU cores; stages are not paced",
        "model": spec.model,
        "stages": {"prefill": spec.prefill, "relay": spec.relay, "main": spec.main},
        "threads_per_stage": spec.threads,
        "stall_ms": STALL_MS,
    }


def _write(path: Path, report: dict[str, Any]) -> None:
    path.write_text(json.dumps(report, indent=2) + "\n")


def _show_timeline(asked: Sequence[Asked], rows: Sequence[dict[str, Any]], picture: Path) -> None:
    """The relayed request with the most tokens from both decode stages; says so if there is none."""
    relayed = [one for one, row in zip(asked, rows, strict=True) if row["tokens_relay"] and row["tokens_main"]]
    if not relayed:
        out.print("[yellow]No request was handed over from relay to main decode: no timeline.[/yellow]")
        return
    shown = max(relayed, key=lambda one: min(one.answer.count("relay"), one.answer.count("main")))
    title = f"{shown.chat} {shown.turn}: {len(shown.prompt_ids)} prompt tokens, TTFT {shown.answer.ttft_ms:,.0f} ms"
    bars = timeline.bars_of(shown.answer)
    out.print(timeline.draw(bars, title, max(20, min(72, out.width - 40))))
    timeline.save(bars, f"kvrelay demo, {title} (emulated WAN)", picture)


def _judge(asked: Sequence[Asked], rows: Sequence[dict[str, Any]]) -> int:
    """The exit code, with a word on what is wrong."""
    missing = {"p-md", "p-rld-md"} - {row["pipeline"] for row in rows}
    if missing:
        out.print(f"[yellow]No request took {' or '.join(sorted(missing))}: try another --wan-rate.[/yellow]")
    bad = [one for one, row in zip(asked, rows, strict=True) if not row["matches_reference"]]
    for one in bad:
        out.print(f"[red]{one.chat} {one.turn}: {one.answer.error or 'differs from the reference'}[/red]")
    whole = len(asked) == sum(len(chat.turns) for chat in CHATS)
    return 0 if whole and not bad else 1
