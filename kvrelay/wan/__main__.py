"""`python -m kvrelay.wan`: flags and KVRELAY_* in, a running emulator out. Exit code 2: it could not start."""

import logging

import uvloop

from kvrelay.program import START_ERRORS, begin, give_up, shown
from kvrelay.wan.app import serve
from kvrelay.wan.settings import WanSettings

PROGRAM = "kvrelay.wan"


def main() -> None:
    """Runs until SIGINT or SIGTERM."""
    settings = begin(PROGRAM, WanSettings)
    logging.getLogger(PROGRAM).info("settings: %s", shown(settings))
    try:
        uvloop.run(serve(settings))
    except START_ERRORS as error:
        give_up(PROGRAM, str(error))


if __name__ == "__main__":
    main()
