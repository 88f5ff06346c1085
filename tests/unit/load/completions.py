"""A small real HTTP server with OpenAI's /v1/completions, streaming: it sends what it is told to, piece by piece."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

USAGE = {"prompt_tokens": 3, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 2}}
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def event(body: object) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


def token(index: int, **more: Any) -> dict[str, Any]:
    return {"id": "cmpl-1", "choices": [{"text": "a", "token_ids": [50 + index], "finish_reason": None, **more}]}


LAST = {"id": "cmpl-1", "choices": [{"text": "", "finish_reason": "length"}], "usage": USAGE}
EVENTS = [*(event(token(index)) for index in range(6)), event(LAST), event(b"[DONE]")]


def chunked(events: list[bytes], head: bytes = OK) -> list[bytes]:
    """What goes over the wire, piece by piece."""
    pieces = [b"%x\r\n%b\r\n" % (len(one), one) for one in events]
    return [head + b"Transfer-Encoding: chunked\r\n\r\n", *pieces, b"0\r\n\r\n"]


@dataclass
class Server:
    """Answers every request with the same pieces, one by one."""

    pieces: list[bytes]
    stalls: bool = False
    """After the pieces it says nothing more."""
    closes: bool = False
    """After the pieces it closes the connection."""
    connections: int = 0
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """A client has closed its connection."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                first, *lines = head.strip().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.requests.append((first, headers, body))
                for piece in self.pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if self.closes:
                    return
                if self.stalls:
                    await reader.read(1)
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            self.gone.set()
            writer.close()


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
