"""`python -m services.router --flags`: one router until SIGTERM or Ctrl-C. Exit code 2: it could not start."""

import asyncio
import logging
import signal
import sys
from contextlib import AsyncExitStack
from typing import NoReturn

import uvloop
from pydantic import ValidationError
from pydantic_settings import SettingsError

from kvrelay.errors import KvrelayError
from kvrelay.telemetry import logging as telemetry
from services.router.app import router_app
from services.router.config import RouterSettings

log = logging.getLogger(__name__)

PROGRAM = "services.router"
EXIT_NOT_STARTED = 2


def main() -> NoReturn:
    """Reads flags and environment, serves, ends the process."""
    try:
        settings = RouterSettings(_cli_parse_args=True, _cli_prog_name=PROGRAM)  # type: ignore[call-arg]
        telemetry.configure(settings.log_level, settings.log_format)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {one['input']!r}" for one in error.errors())
        _give_up("; ".join(problems))
    except (SettingsError, ValueError) as error:
        _give_up(str(error))
    uvloop.run(_serve(settings))
    sys.exit(0)


async def _serve(settings: RouterSettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with AsyncExitStack() as life:
        try:
            app = await life.enter_async_context(router_app(settings))
        except (KvrelayError, OSError, ValueError) as error:
            _give_up(str(error))
        log.info("%s settings: %s", PROGRAM, " ".join(f"{name}={value}" for name, value in _shown(settings).items()))
        log.info("router serves at %s, policy %s", app.address, settings.policy)
        await stop.wait()
        log.info("stopping; running requests may go on for %g s", settings.shutdown_grace_s)
    log.info("stopped")


def _shown(settings: RouterSettings) -> dict[str, object]:
    """Without the password of Redis."""
    return settings.model_dump() | {"redis_url": settings.redis_url.rpartition("@")[2]}


def _give_up(problem: str) -> NoReturn:
    sys.stderr.write(f"{PROGRAM}: cannot start: {problem}\n")
    sys.exit(EXIT_NOT_STARTED)


if __name__ == "__main__":
    main()
