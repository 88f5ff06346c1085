"""The wiring of a relay decode stage: all of it is shared."""

from contextlib import AbstractAsyncContextManager

from kvrelay.settings import StageSettings
from kvrelay.stage.app import StageApp, decode_app
from kvrelay.types import Role


def relay_decode_app(settings: StageSettings) -> AbstractAsyncContextManager[StageApp]:
    """A relay decode stage that serves until the body ends; see decode_app."""
    return decode_app(settings, Role.RELAY)
