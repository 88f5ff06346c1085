"""Sockets of bulk connections: how they are opened, kept alive and woken. Knows no message."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from kvrelay.rpc.address import bare_host, split_address


async def connect(address: str) -> socket.socket:
    """A connected socket that does not block. OSError, ValueError: it cannot be had."""
    host, port = split_address(address, "bulk door")
    loop = asyncio.get_running_loop()
    last: OSError = OSError(f"{host} has no address")
    for family, kind, protocol, _, where in await _resolved(bare_host(host), port):
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            keep_alive(sock)
            if ipaddress.ip_address(where[0]).is_loopback:
                unpaced(sock)
            await loop.sock_connect(sock, where)
            return sock
        except OSError as error:
            last = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    raise last


async def _resolved(host: str, port: int) -> Sequence[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple]]:  # type: ignore[type-arg]
    loop = asyncio.get_running_loop()
    return await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)


def unpaced(sock: socket.socket) -> None:
    """For a peer on this host, before it is connected: there is nothing to share and nothing to lose, and a kernel that
    paces (BBR) sets a timer for every 64 KiB.
    """
    if hasattr(socket, "TCP_CONGESTION"):
        with contextlib.suppress(OSError):  # Reno is everybody's, but need not be there
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def keep_alive(sock: socket.socket) -> None:
    """A dead path is known within about ten seconds, also while nothing is sent."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 10_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
