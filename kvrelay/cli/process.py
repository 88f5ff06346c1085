"""One child process: its command, log file, state, and how it ends. Knows no gRPC, nor what the process is for."""

import asyncio
import contextlib
import enum
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from kvrelay.cli import child

CHILD = str(Path(child.__file__).resolve())


class State(enum.StrEnum):
    """Where a process is in its life."""

    IDLE = "idle"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Ended because it was asked to."""
    DIED = "died"
    """Ended by itself."""


class Process:
    """A program in a process group of its own, so that a terminal's Ctrl-C reaches it only through its parent.

    Its stdout and stderr go to `log_path`, which the first start empties. `on_change` is called, on the loop, at each
    change of `state`.
    """

    def __init__(
        self, name: str, argv: list[str], log_path: Path, address: str, on_change: Callable[["Process"], None]
    ) -> None:
        self.name = name
        self.argv = argv
        self.log_path = log_path
        self.address = address
        self.state = State.IDLE
        self.returncode: int | None = None
        self._on_change = on_change
        self._running: asyncio.subprocess.Process | None = None
        self._ended = asyncio.Event()

    @property
    def pid(self) -> int:
        """0 before the first start."""
        return self._running.pid if self._running else 0

    def become(self, state: State) -> None:
        """Notes a new state and tells the observer."""
        self.state = state
        self._on_change(self)

    async def start(self) -> None:
        """Starts the program; call from the main thread (see child.py). OSError if it cannot be forked."""
        self._ended = asyncio.Event()
        self.returncode = None
        log = await asyncio.to_thread(open_log, self.log_path, self.argv, self._running is None)
        try:
            self._running = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", CHILD, str(os.getpid()), *self.argv,
                stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(log)
        self.become(State.STARTING)

    async def watch(self) -> None:
        """Waits for the end and notes it; one task per start runs this."""
        assert self._running is not None
        self.returncode = await self._running.wait()
        self.become(State.STOPPED if self.state is State.STOPPING else State.DIED)
        self._ended.set()

    async def ended(self) -> None:
        """Returns once the program has ended (at once if it has)."""
        await self._ended.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the program's whole group; nothing if it has ended."""
        if self._running is not None and self._running.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._running.pid, number)

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, and SIGKILL after grace_s. True if it ended by itself in time, or was not running."""
        if self._running is None or self._ended.is_set():
            return True
        self.become(State.STOPPING)
        self.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self.ended()
            return True
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.ended()
            return False

    async def tail(self, lines: int = 15) -> list[str]:
        """The last lines of the log; empty if there is none."""
        return (await asyncio.to_thread(read_end, self.log_path))[-lines:]


def read_end(path: Path, most_bytes: int = 64 * 1024) -> list[str]:
    """The lines at the end of a text file; empty if there is none."""
    with contextlib.suppress(OSError):
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - most_bytes))
            return log.read().decode(errors="replace").splitlines()
    return []


def open_log(path: Path, argv: list[str], anew: bool) -> int:
    """A file descriptor that appends to the log (emptied first, if `anew`), whose next line is the command."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (os.O_TRUNC if anew else 0)
    log = os.open(path, mode, 0o644)
    os.write(log, f"$ {' '.join(argv)}\n".encode())
    return log
