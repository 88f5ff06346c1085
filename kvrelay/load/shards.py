"""A load run by several processes, each with its share of the conversations. Knows how they talk: pickles on pipes.

`python -m kvrelay.load.shards` is such a process. It gets its options, says that it is ready, gets the moment to begin,
and sends each record as it ends. When its input ends (its parent is gone), so does it.
"""

import asyncio
import os
import pickle
import struct
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import uvloop

from kvrelay.errors import KvrelayError
from kvrelay.load.arrival import Share
from kvrelay.load.record import Record
from kvrelay.load.run import LoadOptions, LoadRun, Observer, Progress

HEAD = struct.Struct("<I")
HEAD_START_S = 0.3
"""From the last process's ready to the common beginning."""


class ShardFailed(KvrelayError):
    """A process of the generator ended before its run did."""


@dataclass(frozen=True, slots=True)
class ShardsResult:
    """What they did together."""

    records: list[Record]
    """In order of their arrival here."""
    wall_s: float
    """Of the longest."""
    cpu_share: float
    """Of one core, by the busiest process."""
    warm_up_errors: list[str]


async def run_shards(options: LoadOptions, on_progress: Observer = lambda progress: None) -> ShardsResult:
    """Warms up from here, then runs `options.processes` processes at once. ShardFailed if one dies."""
    errors: list[str] = []
    if options.warm_caches:
        async with options.target.open() as target:
            errors = await LoadRun(options, target).warm_up()
    whole = Whole(on_progress)
    async with asyncio.TaskGroup() as group:
        ready = [asyncio.Event() for _ in range(options.processes)]
        begins: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        ends = [
            group.create_task(_shard(options, Share(number, options.processes), event, begins, whole))
            for number, event in enumerate(ready)
        ]
        for event in ready:
            await event.wait()
        begins.set_result(time.time() + HEAD_START_S)
    walls, shares = zip(*(task.result() for task in ends), strict=True)
    return ShardsResult(whole.records, max(walls), max(shares), errors)


class Whole:
    """The sum of what the shards tell."""

    def __init__(self, observe: Observer) -> None:
        self.records: list[Record] = []
        self._sent = 0
        self._observe = observe

    def take(self, record: Record | None) -> None:
        """A request was sent (None) or has ended."""
        self._sent += record is None
        if record is not None:
            self.records.append(record)
        self._observe(Progress(self._sent, len(self.records), record))


async def _shard(
    options: LoadOptions, share: Share, ready: asyncio.Event, begins: "asyncio.Future[float]", whole: Whole
) -> tuple[float, float]:
    async with _process() as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(frame(replace(options, share=share, processes=1)))
        try:
            await read_frame(process.stdout)
            ready.set()
            process.stdin.write(frame(await asyncio.shield(begins)))
            while True:
                kind, value = await read_frame(process.stdout)
                if kind == "done":
                    return float(value[0]), float(value[1])
                whole.take(value)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ShardFailed(f"process {share.number + 1} of {share.of} of the generator died; see above") from None


@asynccontextmanager
async def _process() -> AsyncIterator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=pipe, stdout=pipe, start_new_session=True
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def frame(value: object) -> bytes:
    """Its length, then its pickle."""
    body = pickle.dumps(value)
    return HEAD.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> Any:
    """The next value. IncompleteReadError: the other end is gone."""
    (length,) = HEAD.unpack(await reader.readexactly(HEAD.size))
    return pickle.loads(await reader.readexactly(length))


async def _main(options: LoadOptions, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    def told(progress: Progress) -> None:
        writer.write(frame(("progress", progress.record)))

    async with options.target.open() as target:
        run = LoadRun(options, target, told)
        writer.write(frame(("ready", None)))
        await run.measure(await read_frame(reader))
    writer.write(frame(("done", (run.wall_s, run.cpu_share))))
    await writer.drain()


async def _child(output: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=2**30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, output)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    work = asyncio.ensure_future(_main(await read_frame(reader), reader, writer))
    gone = asyncio.ensure_future(_until_gone(reader, work))
    await asyncio.wait([work])
    gone.cancel()
    await work


async def _until_gone(reader: asyncio.StreamReader, work: "asyncio.Future[None]") -> None:
    """Cancels the work when the parent has gone."""
    while not reader.at_eof():  # noqa: ASYNC110  # nothing waits for the end while another task reads
        await asyncio.sleep(0.2)
    work.cancel()


def main(arguments: Sequence[str] = ()) -> None:
    """One shard, until its end."""
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_child(output))


if __name__ == "__main__":
    main()
