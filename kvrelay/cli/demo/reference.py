"""One engine, asked one request at a time: what every answer must equal.

It runs in processes of its own (`python -m kvrelay.cli.demo.reference MODEL DTYPE`), so that Ctrl-C ends it at once: a
request goes in as a line of JSON, its result comes out as one. Nothing of a route is used: the prompt, the sampling
parameters and the seed make the answer.
"""

import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from kvrelay.cli.cluster import ClusterError
from kvrelay.cli.demo.asking import Asked
from kvrelay.cli.demo.verdict import Verdict, compare
from kvrelay.cli.process import CHILD
from kvrelay.types import Sampling

LINE_BYTES = 16 * 1024 * 1024
MOST_ENGINES = 4


async def check_all(model: str, dtype: str, asked: Sequence[Asked], observe: Callable[[], None]) -> list[Verdict]:
    """A verdict on each answer, in order; `observe` is called after each. ClusterError if an engine fails.

    There is an engine per core; each has one request at a time.
    """
    verdicts: dict[int, Verdict] = {}
    waiting = iter(range(len(asked)))

    async def check() -> None:
        async with engine(model, dtype) as process:
            for number in waiting:
                one = asked[number]
                ids, margins = await answer(process, one.prompt_ids, one.sampling)
                verdicts[number] = compare(one.answer.ids, ids, margins)
                observe()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(os.cpu_count() or 1, MOST_ENGINES, len(asked))):
            group.create_task(check())
    return [verdicts[number] for number in range(len(asked))]


@asynccontextmanager
async def engine(model: str, dtype: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """An engine's process, killed at the end of the block, or with this process."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", CHILD, str(os.getpid()), sys.executable, "-m", __name__, model, dtype,
        stdin=pipe, stdout=pipe, stderr=pipe, limit=LINE_BYTES, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def answer(
    process: asyncio.subprocess.Process, prompt_ids: Sequence[int], sampling: Sampling
) -> tuple[list[int], list[float]]:
    """The ids that the engine answers, and how near to another outcome each was drawn."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    request = {"prompt_ids": list(prompt_ids), "sampling": dataclasses.asdict(sampling)}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    line = await process.stdout.readline()
    if not line:
        said = (await process.stderr.read()).decode(errors="replace").splitlines()
        raise ClusterError("the reference engine ended before its answer", said[-15:])
    result = json.loads(line)
    return result["ids"], result["margins"]


def main(model: str, dtype: str) -> None:
    """Answers the requests on stdin, one by one."""
    import torch

    from kvrelay.engine.reference import generate_reference
    from kvrelay.model.weights import load_model

    torch.set_num_threads(1)
    loaded = load_model(model, device="cpu", dtype=dtype, block_tokens=16)
    for line in sys.stdin:
        request = json.loads(line)
        wanted = request["sampling"] | {"stop_token_ids": tuple(request["sampling"]["stop_token_ids"])}
        result = generate_reference(loaded, request["prompt_ids"], Sampling(**wanted))
        sys.stdout.write(json.dumps({"ids": result.ids, "margins": result.margins}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:3])
