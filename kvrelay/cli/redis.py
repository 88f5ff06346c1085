"""`kvrelay redis`: the redis-server on PATH, else the packaged one, set up as the prefix index needs it."""

import os
from typing import Annotated

import redis.asyncio
import typer

from kvrelay.cli.console import err, out, run
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
    program = str(find_redis())
    out.print(f"{program} on {host}:{port}")
    out.file.flush()
    settings = {
        "bind": host,
        "port": str(port),
        "protected-mode": "yes" if host == "127.0.0.1" else "no",
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
    }
    os.execv(program, [program, *(part for name, value in settings.items() for part in (f"--{name}", value))])


async def _ping(url: str) -> int:
    async with redis.asyncio.Redis.from_url(url, socket_timeout=3.0, socket_connect_timeout=3.0) as client:
        try:
            await client.ping()
        except redis.RedisError as error:
            err.print(f"{url}: {error}", soft_wrap=True)
            return 1
    return 0
