"""A stage's process: flags, log, start, run until told to stop, exit code. Knows no service."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp, CliSettingsSource, SettingsError

from kvrelay.errors import KvrelayError
from kvrelay.settings import StageSettings
from kvrelay.stage.app import StageApp
from kvrelay.telemetry import logging as telemetry

log = logging.getLogger(__name__)

EXIT_STOPPED = 0
"""Told to stop, and did."""
EXIT_FAILED = 1
"""Was serving and can serve no more."""
EXIT_NOT_STARTED = 2
"""Bad flags, a missing model, a port in use: one line says which."""

S = TypeVar("S", bound=StageSettings)


def run(program: str, settings_class: type[S], app: Callable[[S], AbstractAsyncContextManager[StageApp]]) -> NoReturn:
    """Runs a stage with the settings of the command line and the environment; ends the process."""
    settings = parse_settings(program, settings_class, sys.argv[1:])
    try:
        telemetry.configure(settings.log_level, settings.log_format)
    except ValueError as error:
        _give_up(program, str(error))
    sys.exit(uvloop.run(_serve(program, settings, app)))


async def _serve(program: str, settings: S, app: Callable[[S], AbstractAsyncContextManager[StageApp]]) -> int:
    stop = _stop_signal()
    async with AsyncExitStack() as life:
        try:
            stage = await life.enter_async_context(app(settings))
        except (KvrelayError, OSError, ValueError) as error:
            _complain(program, str(error))
            return EXIT_NOT_STARTED
        _introduce(program, settings, stage)
        ends: list[asyncio.Future[Any]] = [stop, stage.failed]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if stage.failed.done():
            log.error("the stage can serve no more: %r", stage.failed.result())
            return EXIT_FAILED
        log.info("stopping on %s; running requests may go on for %g s", stop.result().name, settings.shutdown_grace_s)
    log.info("stopped")
    return EXIT_STOPPED


def _stop_signal() -> "asyncio.Future[signal.Signals]":
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[signal.Signals] = loop.create_future()

    def come(number: signal.Signals) -> None:
        if not stop.done():
            stop.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, come, number)
    return stop


def _introduce(program: str, settings: StageSettings, stage: StageApp) -> None:
    about = stage.description
    shown = settings.model_dump() | {"redis_url": without_password(settings.redis_url)}
    log.info("%s settings: %s", program, " ".join(f"{name}={value}" for name, value in shown.items()))
    tokens = about.pool_blocks * about.layout.block_tokens
    total = about.pool_blocks * about.layout.block_bytes
    log.info(
        "pool: %d blocks of %d tokens = %d tokens, %d bytes (%.1f MB) of %s on %s",
        about.pool_blocks,
        about.layout.block_tokens,
        tokens,
        total,
        total / 1e6,
        about.layout.dtype,
        about.device,
    )
    log.info(
        "%s (epoch %d) serves %s at %s, advertised as %s",
        about.instance_id,
        about.epoch,
        about.model,
        stage.address,
        about.address,
    )


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":***@") if password else url


def parse_settings(program: str, settings_class: type[S], flags: list[str]) -> S:
    """Flags over KVRELAY_* variables over defaults. What cannot be used ends the process with a line that names it."""
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(settings_class, cli_prog_name=program, cli_parse_args=flags)
        return CliApp.run(settings_class, cli_args=flags, cli_settings_source=source)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {one['input']!r}" for one in error.errors()]
        _give_up(program, "; ".join(problems))
    except SettingsError as error:
        _give_up(program, str(error))


def _give_up(program: str, problem: str) -> NoReturn:
    _complain(program, problem)
    sys.exit(EXIT_NOT_STARTED)


def _complain(program: str, problem: str) -> None:
    sys.stderr.write(f"{program}: cannot start: {problem}\n")
