"""Workers that answer sglang-router at once over HTTP, for bench.router: no model behind them."""

import asyncio
import json
from typing import Any


async def serve_http() -> list[int]:
    """A prefill and a decode worker as sglang-router sees them: /generate streams events, all else is {}."""
    servers = [await asyncio.start_server(_http, "127.0.0.1", 0) for _ in range(2)]
    _KEPT.extend(servers)
    return [server.sockets[0].getsockname()[1] for server in servers]


async def _http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while line := await reader.readline():
            length = 0
            while (header := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            body = await reader.readexactly(length)
            if b" /generate" in line and b'"stream":true' in body.replace(b" ", b""):
                await _stream(writer, json.loads(body))
            else:
                answer = b'{"text":"","status":"ready","max_total_num_tokens":1000000,"model_path":"tiny"}'
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                writer.write(head % len(answer) + answer)
                await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _stream(writer: asyncio.StreamWriter, asked: dict[str, Any]) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for index in range(asked["sampling_params"]["max_new_tokens"]):
        event = b'data: {"text":"","output_ids":[5],"meta_info":{"completion_tokens":%d}}\n\n' % (index + 1)
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await writer.drain()
    event = b"data: [DONE]\n\n"
    writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
    await writer.drain()


_KEPT: list[Any] = []
"""Servers, for the life of this process."""
