"""`python -m kvrelay.wan`: flags and KVRELAY_* variables in, a running emulator out."""

import logging

import uvloop
from pydantic_settings import CliApp

from kvrelay.telemetry.logging import configure
from kvrelay.wan.app import serve
from kvrelay.wan.settings import WanSettings


def main() -> None:
    """Runs until SIGINT or SIGTERM."""
    settings = CliApp.run(WanSettings)
    configure(settings.log_level, settings.log_format)
    logging.getLogger("kvrelay.wan").info("settings: %s", settings.model_dump_json())
    uvloop.run(serve(settings))


if __name__ == "__main__":
    main()
