"""Every command ends with an exit code, and a known error as one line."""

import asyncio
import os
import signal

import pytest
import typer

from kvrelay.cli.cluster import ClusterError
from kvrelay.cli.console import INTERRUPTED, run
from kvrelay.errors import NoStage


async def fails(error: BaseException) -> int:
    raise error


async def groups(error: Exception) -> int:
    async with asyncio.TaskGroup() as group:
        group.create_task(fails(error))
    return 0


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NoStage("main: no stage is usable"), "kvrelay: main: no stage is usable\n"),
        (ClusterError("wan ended", ["the last line"]), "  the last line\nkvrelay: wan ended\n"),
        (OSError("no [such] host"), "kvrelay: no [such] host\n"),
    ],
)
@pytest.mark.parametrize("inside", [fails, groups])
def test_a_known_error_is_one_line_and_exit_code_1(
    error: Exception, said: str, inside: object, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        run(inside(error))  # type: ignore[operator]
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("inside", [fails, groups])
def test_an_error_that_is_a_bug_keeps_its_traceback(inside: object) -> None:
    with pytest.raises(ZeroDivisionError):
        run(inside(ZeroDivisionError()))  # type: ignore[operator]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_command_which_may_still_clean_up(number: signal.Signals) -> None:
    cleaned = []

    async def waits() -> int:
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)
        return 0

    with pytest.raises(typer.Exit) as ended:
        run(waits())
    assert ended.value.exit_code == INTERRUPTED
    assert cleaned == [True]
