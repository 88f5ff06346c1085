"""How every program begins and refuses to begin: flags and environment in, settings or one clear line out.

Knows no service, and imports nothing heavy: what is wrong with the flags is said at once.
"""

import sys
from typing import Any, NoReturn, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError
from pydantic_settings import CliApp, CliSettingsSource, SettingsError

from kvrelay.errors import KvrelayError
from kvrelay.malloc import keep_large_buffers
from kvrelay.rpc.address import split_address
from kvrelay.settings import ProgramSettings, ServiceSettings, StageSettings
from kvrelay.telemetry import logging as telemetry

EXIT_STOPPED = 0
"""Told to stop, and did."""
EXIT_FAILED = 1
"""Was serving and can serve no more."""
EXIT_NOT_STARTED = 2
"""Bad flags, a missing model, a port in use: one line says which."""

START_ERRORS = (KvrelayError, OSError, ValueError)
"""What keeps a program from starting and is the user's to mend; anything else is a bug and shows its traceback."""

_REDIS_SCHEMES = ("redis", "rediss", "unix")

S = TypeVar("S", bound=ProgramSettings)


def begin(program: str, settings_class: type[S]) -> S:
    """Settings of the command line and the environment, with malloc and the log set up; or the end of the process."""
    keep_large_buffers()
    settings = parse_settings(program, settings_class, sys.argv[1:])
    try:
        telemetry.configure(settings.log_level, settings.log_format)
        check_addresses(settings)
    except ValueError as error:
        give_up(program, str(error))
    return settings


def parse_settings(program: str, settings_class: type[S], flags: list[str]) -> S:
    """Flags over KVRELAY_* variables over defaults. What cannot be used ends the process with a line that names it."""
    try:
        source: CliSettingsSource[Any] = CliSettingsSource(
            settings_class, cli_prog_name=f"python -m {program}", cli_parse_args=flags, cli_exit_on_error=False
        )
        return CliApp.run(settings_class, cli_args=flags, cli_settings_source=source)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}, got {one['input']!r}" for one in error.errors()]
        give_up(program, "; ".join(problems))
    except SettingsError as error:
        give_up(program, " ".join(str(error).split()))


def check_addresses(settings: ProgramSettings) -> None:
    """ValueError naming the setting that is no address, or no URL of a Redis."""
    split_address(settings.listen, "listen")
    if not isinstance(settings, ServiceSettings):
        return
    if settings.metrics_listen:
        split_address(settings.metrics_listen, "metrics_listen")
    if isinstance(settings, StageSettings) and settings.bulk_listen:
        split_address(settings.bulk_listen, "bulk_listen")
    if settings.redis_url and urlsplit(settings.redis_url).scheme not in _REDIS_SCHEMES:
        raise ValueError(f"redis_url: must begin with one of {', '.join(_REDIS_SCHEMES)}, got {settings.redis_url!r}")


def shown(settings: ProgramSettings) -> str:
    """All settings in one line, without the password of Redis."""
    values = settings.model_dump()
    if isinstance(settings, ServiceSettings):
        values["redis_url"] = without_password(settings.redis_url)
    return " ".join(f"{name}={value}" for name, value in values.items())


def without_password(url: str) -> str:
    """The URL as it may be shown."""
    password = urlsplit(url).password
    return url.replace(f":{password}@", ":***@") if password else url


def give_up(program: str, problem: str) -> NoReturn:
    """Ends the process with one line and EXIT_NOT_STARTED."""
    complain(program, problem)
    sys.exit(EXIT_NOT_STARTED)


def complain(program: str, problem: str) -> None:
    """The one line."""
    sys.stderr.write(f"{program}: cannot start: {problem}\n")
