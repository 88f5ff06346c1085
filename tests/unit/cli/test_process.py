"""A child process: its states, its log, its end; and its death with its parent."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from kvrelay.cli.process import Process, State


def python(code: str, tmp_path: Path, states: list[State] | None = None) -> Process:
    seen = states if states is not None else []
    argv = [sys.executable, "-I", "-S", "-c", code]
    return Process("one", argv, tmp_path / "logs" / "one.log", "", lambda process: seen.append(process.state))


SLEEP = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


async def moments() -> AsyncIterator[None]:
    """Another process is watched from outside: look, and look again soon."""
    async with asyncio.timeout(10):
        while True:
            yield
            await asyncio.sleep(0.01)


async def until_it_says(process: Process, word: str) -> None:
    async for _ in moments():
        if word in await process.tail():
            return


async def test_a_process_that_is_stopped_ends_in_state_stopped(tmp_path: Path) -> None:
    states: list[State] = []
    process = python(SLEEP, tmp_path, states)
    await process.start()
    watcher = asyncio.ensure_future(process.watch())
    await until_it_says(process, "up")
    assert await process.stop(5.0)
    await watcher
    assert states == [State.STARTING, State.STOPPING, State.STOPPED]
    assert not psutil.pid_exists(process.pid)


async def test_a_process_that_ends_by_itself_has_died_and_its_log_says_why(tmp_path: Path) -> None:
    process = python("raise SystemExit('no such model')", tmp_path)
    await process.start()
    await process.watch()
    assert (process.state, process.returncode) == (State.DIED, 1)
    assert (await process.tail())[-1] == "no such model"
    assert await process.stop(1.0)


async def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    process = python(STUBBORN, tmp_path)
    await process.start()
    watcher = asyncio.ensure_future(process.watch())
    await until_it_says(process, "up")
    assert not await process.stop(0.1)
    await watcher
    assert process.returncode == -signal.SIGKILL


async def test_a_process_can_be_started_again_and_its_log_goes_on(tmp_path: Path) -> None:
    process = python("print('up')", tmp_path)
    for _ in range(2):
        await process.start()
        await process.watch()
    assert (await process.tail()).count("up") == 2


async def test_a_program_that_does_not_exist_is_one_clear_line(tmp_path: Path) -> None:
    process = Process("one", ["/no/such/program"], tmp_path / "one.log", "", lambda process: None)
    await process.start()
    await process.watch()
    assert process.returncode == 127
    assert (await process.tail())[-1] == "/no/such/program: No such file or directory"


PARENT = """
import asyncio, pathlib, sys
from kvrelay.cli.process import Process

async def main():
    argv = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"]
    process = Process("child", argv, pathlib.Path(sys.argv[1]), "", lambda process: None)
    await process.start()
    print(process.pid, flush=True)
    await process.watch()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
async def test_a_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, log, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    async for _ in moments():
        if child.cmdline()[-1] == "import time; time.sleep(60)":
            break
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    await asyncio.to_thread(gone, child)


def gone(process: psutil.Process) -> None:
    """Returns once it has ended; a zombie that nobody reaps (in a container without init) has ended too."""
    try:
        process.wait(timeout=5)
    except psutil.TimeoutExpired:
        assert process.status() == psutil.STATUS_ZOMBIE
