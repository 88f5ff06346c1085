"""`kvrelay redis`: the redis-server on PATH, else the packaged one, set up as the prefix index needs it."""

import os
from typing import Annotated

import redis.asyncio
import typer

from kvrelay.cli.console import err, out, run
from kvrelay.cli.spec import redis_argv
from kvrelay.index.server import find_redis


def redis_(
    host: Annotated[
        str, typer.Option(help="To bind. Anyone who reaches it can read and write the index.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = 6379,
    ping: Annotated[str, typer.Option(metavar="URL", help="Start nothing: exit code 0 if this Redis answers.")] = "",
) -> None:
    """Run a Redis for the prefix index: nothing on disk, nothing evicted."""
    if ping:
        run(_ping(ping))
    argv = redis_argv(find_redis(), host, port)
    out.print(f"{argv[0]} on {host}:{port}")
    out.file.flush()
    os.execv(argv[0], argv)


async def _ping(url: str) -> int:
    async with redis.asyncio.Redis.from_url(url, socket_timeout=3.0, socket_connect_timeout=3.0) as client:
        try:
            await client.ping()
        except redis.RedisError as error:
            err.print(f"{url}: {error}", soft_wrap=True)
            return 1
    return 0
