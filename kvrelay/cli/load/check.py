"""Whether the answers of a run equal those of one engine alone. Knows the reference's processes."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

from rich.progress import Progress

from kvrelay.cli.console import err, out
from kvrelay.cli.demo import reference
from kvrelay.cli.demo.verdict import Verdict, compare
from kvrelay.load.record import Record
from kvrelay.proto.v1 import common_pb2, router_pb2, stage_pb2
from kvrelay.rpc.sampling import sampling_from_client
from kvrelay.types import Sampling


async def compared(records: Sequence[Record], info: stage_pb2.StageInfo, template: bytes, limit: int) -> list[Record]:
    """The records, at most `limit` of them with a verdict; differences are printed. ClusterError: an engine failed.

    Cut answers are compared as far as they go. info: of a stage, which says model, dtype and context.
    """
    wanted = router_pb2.GenerateRequest.FromString(template).sampling
    chosen = choose([number for number, record in enumerate(records) if record.ids], limit)
    checked = list(records)
    with Progress(console=err) as progress:
        task = progress.add_task("comparing with one engine", total=len(chosen))
        waiting = iter(chosen)

        async def check() -> None:
            async with reference.engine(info.model, info.layout.dtype) as process:
                for number in waiting:
                    one = records[number]
                    ids, margins = await reference.answer(process, one.prompt_ids, sampling_of(one, wanted))
                    checked[number] = judged(one, ids, margins)
                    progress.update(task, advance=1)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(os.cpu_count() or 1, reference.MOST_ENGINES, len(chosen))):
                group.create_task(check())
    for number in chosen:
        _tell(checked[number])
    return checked


def choose(numbers: Sequence[int], limit: int) -> list[int]:
    """At most `limit` of them, evenly."""
    if len(numbers) <= limit:
        return list(numbers)
    return [numbers[place * len(numbers) // limit] for place in range(limit)]


def sampling_of(record: Record, wanted: common_pb2.Sampling) -> Sampling:
    """As the router resolved it: what the record says, over what every request said."""
    return sampling_from_client(
        wanted,
        prompt_tokens=0,
        max_model_tokens=record.wanted_tokens,
        vocab_size=2**32,
        draw_seed=lambda: record.seed,
    )


def judged(record: Record, ids: Sequence[int], margins: Sequence[float]) -> Record:
    """With its verdict; an answer that was cut (cancelled, unfinished, failed) need only be a beginning of `ids`."""
    if not record.ok:
        ids, margins = ids[: len(record.ids)], margins[: len(record.ids)]
    verdict: Verdict = compare(record.ids, ids, margins)
    return replace(record, matches=verdict.matches, first_difference=verdict.first_difference, margin=verdict.margin)


def _tell(record: Record) -> None:
    if record.first_difference is None:
        return
    margin = "one answer is cut short" if record.margin is None else f"margin {record.margin:.2g}"
    word = "near-tie" if record.matches else "[red]WRONG[/red]"
    where = f"{record.conversation} turn {record.turn} ({record.request_id})"
    out.print(f"{word}: {where} first differs from the reference at index {record.first_difference}, {margin}")
