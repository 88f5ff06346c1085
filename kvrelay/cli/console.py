"""How every command runs: one event loop, signals that cancel, an error as one line. Knows no command."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, NoReturn

import grpc
import typer
import uvloop
from rich.console import Console
from rich.markup import escape

from kvrelay.cli.cluster import ClusterError
from kvrelay.errors import KvrelayError
from kvrelay.load.client import status_text

PAGE = 120
"""Columns of what is written to a file or a pipe."""


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = PAGE
    return console


out = _console(stderr=False)
err = _console(stderr=True)

INTERRUPTED = 130
KNOWN = (ClusterError, KvrelayError, grpc.aio.AioRpcError, OSError)


def run(work: Coroutine[Any, Any, int]) -> NoReturn:
    """Runs a command's coroutine and exits with the code it returns.

    SIGINT and SIGTERM cancel it (exit code 130); a known error is shown as one line (exit code 1).
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_cancelled_by_signals(work))
    except asyncio.CancelledError:
        code = INTERRUPTED
    except (*KNOWN, BaseExceptionGroup) as error:
        code = _explain(_known(error))
    raise typer.Exit(code)


async def _cancelled_by_signals(work: Coroutine[Any, Any, int]) -> int:
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await task


def _known(error: BaseException) -> BaseException:
    """The error itself, or the first of a group; one that is not known is raised, since it is a bug."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, KNOWN):
        raise error
    return error


def _explain(error: BaseException) -> int:
    if isinstance(error, ClusterError):
        for line in error.tail:
            err.print(f"  [dim]{escape(line)}[/dim]", soft_wrap=True)
    text = status_text(error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
    err.print(f"[red]kvrelay:[/red] {escape(text)}", soft_wrap=True)
    return 1
