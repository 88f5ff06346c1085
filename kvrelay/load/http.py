"""A small HTTP/1.1 client on asyncio streams: one POST, its body as lines while they come. Knows no API.

Connections are kept and used again, as a server's other clients would.
"""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

LINE_BYTES = 4 * 1024 * 1024


class HttpError(Exception):
    """The server answered with a status that is not 200, or with what is no HTTP."""


@dataclass(frozen=True, slots=True)
class Url:
    """Where a server is."""

    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def parse(cls, text: str) -> "Url":
        """ "http://host:8000/v1". ValueError otherwise."""
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{text!r}: expected http://HOST:PORT or https://HOST")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))


@dataclass(slots=True)
class Wire:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    used: bool = False

    async def close(self) -> None:
        """Closes it, whatever state it is in."""
        self.writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await self.writer.wait_closed()


class HttpClient:
    """Connections to one server. `async with client.post(...) as lines`: leaving early closes the connection."""

    def __init__(self, url: Url, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = dict(headers)
        self._idle: list[Wire] = []
        self._tls: ssl.SSLContext | None = None

    async def close(self) -> None:
        """Closes the idle connections; those in use close with their block."""
        while self._idle:
            await self._idle.pop().close()

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of the answer's body, without their ends. HttpError, OSError."""
        wire, (status, headers) = await self._sent(self._request(path, body))
        whole = False
        try:
            async with aclosing(_body(wire.reader, headers)) as pieces, aclosing(_lines(pieces)) as lines:
                if status != 200:
                    raise HttpError(f"HTTP {status}: {await _excerpt(lines)}")
                yield lines
                async for _ in lines:  # what follows the API's last word, so that the connection can serve again
                    pass
            whole = headers.get("connection", "").lower() != "close" and _framed(headers)
        finally:
            if whole:
                self._idle.append(wire)
            else:
                await wire.close()

    def _request(self, path: str, body: bytes) -> bytes:
        fields = {
            "Host": f"{self._url.host}:{self._url.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Accept": "text/event-stream",
        } | self._headers
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"POST {self._url.path}{path} HTTP/1.1\r\n{head}\r\n".encode() + body

    async def _sent(self, request: bytes) -> tuple[Wire, tuple[int, dict[str, str]]]:
        """A connection on which the request was sent and answered; a kept one that has died meanwhile is replaced."""
        while True:
            wire = self._idle.pop() if self._idle else await self._connected()
            try:
                wire.writer.write(request)
                await wire.writer.drain()
                head = await _head(wire.reader)
            except (ConnectionError, asyncio.IncompleteReadError) as error:
                await wire.close()
                if not wire.used:
                    raise HttpError(f"the connection was closed before an answer: {error}") from None
                continue
            except asyncio.LimitOverrunError as error:
                await wire.close()
                raise HttpError(f"no HTTP answer: {error}") from None
            except BaseException:
                await wire.close()
                raise
            wire.used = True
            return wire, head

    async def _connected(self) -> Wire:
        if self._url.tls and self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        reader, writer = await asyncio.open_connection(self._url.host, self._url.port, ssl=self._tls, limit=LINE_BYTES)
        return Wire(reader, writer)


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = await reader.readuntil(b"\n")
    parts = first.split(maxsplit=2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise HttpError(f"no HTTP answer: {first[:80]!r}")
    headers: dict[str, str] = {}
    while line := (await reader.readuntil(b"\n")).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return int(parts[1]), headers


def _framed(headers: Mapping[str, str]) -> bool:
    return "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
    """Pieces, as they come: chunked, of a given length, or until the server closes. HttpError: it was cut short."""
    try:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            while size := int((await reader.readuntil(b"\n")).split(b";")[0], 16):
                yield await reader.readexactly(size)
                await reader.readuntil(b"\n")
            while (await reader.readuntil(b"\n")).strip():
                pass
        elif "content-length" in headers:
            left = int(headers["content-length"])
            while left and (piece := await reader.read(min(left, 65536))):
                left -= len(piece)
                yield piece
            if left:
                raise HttpError(f"the answer was cut: {left} bytes are missing")
        else:
            while piece := await reader.read(65536):
                yield piece
    except asyncio.IncompleteReadError:
        raise HttpError("the answer was cut: the connection was closed before its end") from None
    except (asyncio.LimitOverrunError, ValueError) as error:
        raise HttpError(f"the answer is no HTTP: {error}") from None


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line.rstrip(b"\r")
    if rest:
        yield rest


async def _excerpt(lines: AsyncIterator[bytes]) -> str:
    text = b" ".join([line async for line in lines])[:300]
    return text.decode(errors="replace")
