"""A port of the emulator that leads to one target. Opens and closes its listener; knows no shaping."""

import asyncio
import socket
from collections.abc import Callable, Iterable

from kvrelay.rpc.address import bare_host

KERNEL_BYTES = 512 * 1024
"""Of each connection before the emulated link: little, so that it is the link that holds a caller back, and enough for
a late event loop not to starve a gigabit."""


class Mapping:
    """A port that stays reserved while its listener comes and goes: connecting is refused in between."""

    def __init__(self, target: str, site: str, host: str, ports: Iterable[int]) -> None:
        """Takes the first of `ports` that is free. OSError: none is."""
        self.target = target
        self.site = site
        self._holder = _first_free(host, ports)
        self._host = host
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """As bound."""
        return int(self._holder.getsockname()[1])

    async def listen(self, accept: Callable[[], asyncio.BaseProtocol]) -> None:
        """Accepts connections, each with a protocol of its own. Idempotent."""
        if self._server is None:
            listener = _bound(self._host, self.port)
            self._server = await asyncio.get_running_loop().create_server(accept, sock=listener, backlog=512)

    def refuse(self) -> None:
        """Accepts no more. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def close(self) -> None:
        """Gives the port back."""
        self.refuse()
        self._holder.close()


def _bound(host: str, port: int) -> socket.socket:
    bare = bare_host(host)
    sock = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Holder and listener are bound to the same port; only a socket that listens is ever connected to.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Inherited by what is accepted.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KERNEL_BYTES)
        sock.bind((bare, port))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _first_free(host: str, ports: Iterable[int]) -> socket.socket:
    last: OSError | None = None
    for port in ports:
        try:
            return _bound(host, port)
        except OSError as error:
            last = error
    raise last or OSError(f"no port of the range is left on {host}")
