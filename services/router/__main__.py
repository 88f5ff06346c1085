"""`python -m services.router --flags`: one router until SIGTERM or Ctrl-C. Exit code 2: it could not start."""

import asyncio
import gc
import logging
import signal
import sys
from contextlib import AsyncExitStack
from typing import NoReturn

import uvloop

from kvrelay.grpc_core import read_in_place
from kvrelay.program import EXIT_STOPPED, START_ERRORS, begin, give_up, shown
from services.router.config import RouterSettings

PROGRAM = "services.router"

log = logging.getLogger(PROGRAM)


def main() -> NoReturn:
    """Reads flags and environment, serves, ends the process."""
    settings = begin(PROGRAM, RouterSettings)
    if not read_in_place():
        log.info("gRPC's event engine is as GRPC_EXPERIMENTS says; without it a core relays more tokens")
    uvloop.run(_serve(settings))
    sys.exit(EXIT_STOPPED)


async def _serve(settings: RouterSettings) -> None:
    from services.router.app import router_app  # with it gRPC, which has been told how to read by now

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as life:
        try:
            app = await life.enter_async_context(router_app(settings))
        except START_ERRORS as error:
            give_up(PROGRAM, str(error))
        keep_collections_short()
        log.info("%s settings: %s", PROGRAM, shown(settings))
        log.info("router serves at %s, policy %s", app.address, settings.policy)
        await stop.wait()
        log.info("stopping; running requests may go on for %g s", settings.shutdown_grace_s)
    log.info("stopped")


def keep_collections_short() -> None:
    """Python's collector leaves alone what was loaded by now: it stays, and walking over its
    61,000 objects holds up every stream for 12 ms. What requests make, which is nearly always freed by counting, is
    looked at less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


if __name__ == "__main__":
    main()
