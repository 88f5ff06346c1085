"""The receiving end of bulk connections: the doors of lanes, and who may come in. Reads no byte."""

import asyncio
import hmac
import os
import secrets
import socket
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

from kvrelay.rpc.address import bare_host, split_address
from kvrelay.transfer.bulk_reader import BulkReader
from kvrelay.transfer.bulk_wire import BadMessage
from kvrelay.transfer.carrier import BulkDoor
from kvrelay.transfer.receiving import ReceivingLane

TOKEN_BYTES = 16
REMEMBERED = 8192
"""Doors that were shut: whoever comes late is known, and its frames go nowhere."""


class BulkServer:
    """Doors for lanes. `address`: host:port as bound; `advertised`: as senders reach it."""

    def __init__(self) -> None:
        self.address = ""
        self.advertised = ""
        self.connections: set[BulkReader] = set()
        self.closed = False
        """Whoever comes now is not let in."""
        self.turned_away = 0
        """Connections closed because of what came over them."""
        self._doors: dict[int, tuple[bytes, ReceivingLane]] = {}
        self._shut: OrderedDict[int, bytes] = OrderedDict()
        self._numbers: dict[ReceivingLane, int] = {}
        self._next = 1

    def open(self, lane: ReceivingLane) -> BulkDoor:
        """Part of Doors."""
        number, token = self._next, secrets.token_bytes(TOKEN_BYTES)
        self._next += 1
        self._doors[number] = (token, lane)
        self._numbers[lane] = number
        return BulkDoor(self.advertised, number, token)

    def shut(self, lane: ReceivingLane) -> None:
        """Part of Doors."""
        number = self._numbers.pop(lane, None)
        if number is not None and number in self._doors:
            self._remember(number, self._doors.pop(number)[0])

    def enter(self, number: int, token: bytes) -> ReceivingLane | None:
        """Whoever has the token comes in, once; None: the lane is over. BadMessage: the token is wrong."""
        expected, lane = self._doors.get(number) or (self._shut.get(number), None)
        if not hmac.compare_digest(expected or bytes(TOKEN_BYTES), token) or expected is None:
            raise BadMessage("a token that is not good")
        self._doors.pop(number, None)
        self._shut.pop(number, None)
        return lane

    def leftovers(self) -> dict[str, int]:
        """What is still held, by kind; all zero when idle."""
        return {"bulk_doors": len(self._numbers)}

    def _remember(self, number: int, token: bytes) -> None:
        self._shut[number] = token
        if len(self._shut) > REMEMBERED:
            self._shut.popitem(last=False)


@asynccontextmanager
async def bulk_server(listen: str) -> AsyncIterator[BulkServer]:
    """A server at `listen` until the body ends; `advertised` is the bound address at first. OSError: it cannot bind."""
    server = BulkServer()
    host, port = split_address(listen, "bulk_listen")
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: _Door(server), bare_host(host), port)
    server.address = server.advertised = f"{host}:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        server.closed = True
        listener.close()
        for connection in list(server.connections):
            connection.close()


class _Door(asyncio.Protocol):
    """Takes a connection that the loop has accepted from its transport, before anything is read."""

    def __init__(self, server: BulkServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of Protocol."""
        try:
            if not self._server.closed:
                sock = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
                sock.setblocking(False)
                BulkReader(self._server, sock, transport.get_extra_info("peername"))
        finally:
            cast(asyncio.Transport, transport).abort()  # uvloop's is none by inheritance
