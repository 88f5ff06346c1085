"""Prometheus text over HTTP, from the event loop that owns what is measured. Knows no metric."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from kvrelay.rpc.address import bare_host, split_address

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0
_HEAD_BYTES = 16 * 1024


@asynccontextmanager
async def serve_metrics(registry: CollectorRegistry, listen: str) -> AsyncIterator[str]:
    """Serve `GET /metrics` until the body ends; gives host:port as bound. An empty `listen` serves nothing.

    prometheus_client's own servers answer from threads; here callbacks read the loop's state on the loop, unlocked.
    OSError: the address cannot be bound. ValueError: `listen` is not host:port.
    """
    if not listen:
        yield ""
        return
    host, port = split_address(listen, "metrics_listen")
    scrapes: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        scrapes.add(task)
        try:
            await _answer(registry, reader, writer)
        finally:
            scrapes.discard(task)

    try:
        server = await asyncio.start_server(answer, bare_host(host), port, limit=_HEAD_BYTES)
    except OSError as exc:
        raise OSError(exc.errno, f"cannot serve metrics on {listen}: {exc.strerror}") from exc
    bound = f"{host}:{server.sockets[0].getsockname()[1]}"
    log.info("metrics on http://%s/metrics", bound)
    try:
        yield bound
    finally:
        server.close()
        for task in scrapes:
            task.cancel()
        await asyncio.gather(*scrapes, return_exceptions=True)
        await server.wait_closed()


async def _answer(registry: CollectorRegistry, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request a connection."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(_response(registry, head.split(b"\r\n", 1)[0]))
            await writer.drain()
    except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as exc:
        log.debug("metrics: %r", exc)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _response(registry: CollectorRegistry, request_line: bytes) -> bytes:
    method, _, rest = request_line.partition(b" ")
    path = rest.split(b" ")[0].split(b"?")[0]
    if method != b"GET":
        return _message("405 Method Not Allowed", b"only GET\n")
    if path not in (b"/metrics", b"/"):
        return _message("404 Not Found", b"only /metrics\n")
    return _message("200 OK", generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4)


def _message(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> bytes:
    fields = (f"Content-Type: {content_type}", f"Content-Length: {len(body)}", "Connection: close")
    return "\r\n".join((f"HTTP/1.1 {status}", *fields, "", "")).encode() + body
