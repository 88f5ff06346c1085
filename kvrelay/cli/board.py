"""One line per process: kept up to date on a terminal, else printed at each change. Knows processes only."""

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvrelay.cli.process import Process, State

COLOURS = {
    State.IDLE: "dim",
    State.STARTING: "yellow",
    State.READY: "green",
    State.STOPPING: "yellow",
    State.STOPPED: "dim",
    State.DIED: "bold red",
}


class ProcessBoard:
    """`with ProcessBoard(console) as board:`; give `board.changed` to the cluster."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._processes: dict[str, Process] = {}
        self._notes: list[str] = []
        self._open = True
        self._began = time.monotonic()
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8)

    def __enter__(self) -> "ProcessBoard":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Shows nothing from now on."""
        self._open = False
        self._live.stop()

    def changed(self, process: Process) -> None:
        """A process has another state."""
        self._processes[process.name] = process
        if self._open and not self._console.is_terminal:
            self._console.print(_line(process), soft_wrap=True)

    def say(self, note: str) -> None:
        """A line for the person who watches."""
        self._notes.append(note)
        if not self._console.is_terminal:
            self._console.print(note, markup=False, soft_wrap=True)

    def _render(self) -> Group:
        table = Table("process", "pid", "address", "state", box=None, pad_edge=False)
        for process in self._processes.values():
            table.add_row(process.name, str(process.pid), process.address, _state(process))
        waiting = sum(process.state is State.STARTING for process in self._processes.values())
        rows: list[Table | Spinner | Text] = [table, *(Text(note) for note in self._notes)]
        if not self._notes:
            rows.append(Spinner("dots", f"starting, {waiting} to go, {time.monotonic() - self._began:.0f} s"))
        return Group(*rows)


def _line(process: Process) -> Text:
    return Text.assemble(f"{process.name:12} {process.pid:>8}  {process.address:24} ", _state(process))


def _state(process: Process) -> Text:
    code = f" ({process.returncode})" if process.state is State.DIED else ""
    return Text(process.state + code, style=COLOURS[process.state])
