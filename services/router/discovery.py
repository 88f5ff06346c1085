"""Where stages are: static addresses, DNS names, instance keys in Redis. Only addresses; dials nobody."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence

from kvrelay.rpc.address import split_address
from kvrelay.types import StageDescription

log = logging.getLogger(__name__)

Instances = Callable[[], Awaitable[list[StageDescription]]]


async def resolve(name: str) -> list[str]:
    """host:port of every IPv4/IPv6 address behind host:port; [] if it does not resolve.

    ValueError: not host:port.
    """
    host, port = split_address(name, "stages")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("stages: %s does not resolve: %s", host, error)
        return []
    hosts = dict.fromkeys(str(item[4][0]) for item in found)
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]


async def addresses(static: Sequence[str], instances: Instances | None) -> set[str] | None:
    """All addresses now; None: Redis was asked and did not answer, so nobody may be taken for gone."""
    found: set[str] = set()
    for name in static:
        found.update(await resolve(name))
    if instances is not None:
        try:
            found.update(stage.address for stage in await instances())
        except Exception as error:  # whatever the index's client raises: the fleet goes on with whom it knows
            log.debug("no instances from the index: %s", error)
            return None
    return found
