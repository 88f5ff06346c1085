"""A stage's process: flags, start, run until told to stop, exit code. Knows no service, and loads no torch itself."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import uvloop

from kvrelay.grpc_core import read_in_place
from kvrelay.program import EXIT_FAILED, EXIT_NOT_STARTED, EXIT_STOPPED, START_ERRORS, begin, complain, give_up, shown
from kvrelay.settings import StageSettings
from kvrelay.stage.checks import check

if TYPE_CHECKING:
    from kvrelay.stage.app import StageApp

log = logging.getLogger(__name__)

S = TypeVar("S", bound=StageSettings)

App = Callable[[S], AbstractAsyncContextManager["StageApp"]]


def run(program: str, settings_class: type[S], load_app: Callable[[], App[S]]) -> NoReturn:
    """Runs a stage with the settings of the command line and the environment; ends the process.

    `load_app` imports the wiring, and with it torch, which takes seconds: only once the settings are known to be good.
    """
    settings = begin(program, settings_class)
    if not read_in_place():
        log.info("gRPC's event engine is as GRPC_EXPERIMENTS says; without it KV over gRPC costs less")
    try:
        check(settings)
    except START_ERRORS as error:
        give_up(program, str(error))
    sys.exit(uvloop.run(_serve(program, settings, load_app())))


async def _serve(program: str, settings: S, app: App[S]) -> int:
    stop = _stop_signal()
    async with AsyncExitStack() as life:
        try:
            stage = await life.enter_async_context(app(settings))
        except START_ERRORS as error:
            complain(program, str(error))
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


def _introduce(program: str, settings: StageSettings, stage: "StageApp") -> None:
    about = stage.description
    log.info("%s settings: %s", program, shown(settings))
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
