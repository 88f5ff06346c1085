"""How much this generator can drive on one core, against a router that does nothing. Measured, never assumed."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrelay.errors import KvrelayError
from kvrelay.load.arrival import ClosedLoop
from kvrelay.load.groups import PrefixGroups
from kvrelay.load.lengths import Lengths
from kvrelay.load.run import LoadOptions, LoadRun
from kvrelay.load.target import RouterTarget

PROMPT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class OwnLimit:
    """What one process drove."""

    output_tokens: int
    """Of each request."""
    requests_per_s: float
    tokens_per_s: float
    cpu_share: float
    """Of a core, that the generator used for it."""

    @property
    def requests_per_core_s(self) -> float:
        """On a whole core: beyond what was driven, if the null router could not keep up."""
        return self.requests_per_s / max(self.cpu_share, 1e-9)

    @property
    def tokens_per_core_s(self) -> float:
        """As requests_per_core_s."""
        return self.tokens_per_s / max(self.cpu_share, 1e-9)


@asynccontextmanager
async def null_router() -> AsyncIterator[str]:
    """Its address; it runs in a process of its own until the end of the block."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrelay.load.null_router", stdin=pipe, stdout=pipe, start_new_session=True
    )
    try:
        assert process.stdout is not None
        port = (await process.stdout.readline()).decode().strip()
        if not port.isdigit():
            raise KvrelayError("the null router ended before it served; see above")
        yield f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def own_limit(address: str, output_tokens: int, duration_s: float, concurrency: int = 16) -> OwnLimit:
    """Drives a null router, closed loop, with answers of so many tokens, one a message."""
    workload = PrefixGroups(
        1, 32000, None, Lengths(PROMPT_TOKENS, PROMPT_TOKENS), Lengths(output_tokens, output_tokens)
    )
    options = LoadOptions(RouterTarget(address), workload, ClosedLoop(concurrency), duration_s=duration_s, grace_s=10.0)
    async with options.target.open() as target:
        run = LoadRun(options, target)
        await run.measure()
    whole = [record for record in run.records if record.ok]
    tokens = sum(record.output_tokens for record in whole)
    return OwnLimit(output_tokens, len(whole) / run.wall_s, tokens / run.wall_s, run.cpu_share)
