"""What a stage's settings cannot say by their types alone. Loads no torch: a bad flag is refused at once."""

from kvrelay import checkpoint
from kvrelay.engine.pace import Pace
from kvrelay.errors import InvalidRequest
from kvrelay.rpc.address import split_address
from kvrelay.settings import StageSettings


def check(settings: StageSettings) -> None:
    """InvalidRequest, ValueError or ModelFileError naming the first setting that cannot be used.

    The model's files are only located here, not read.
    """
    if settings.pool_tokens < settings.block_tokens:
        raise InvalidRequest("pool_tokens", f"{settings.pool_tokens} is less than one block ({settings.block_tokens})")
    if settings.device != "cpu" and not settings.device.startswith("cuda"):
        raise InvalidRequest("device", f'must be "cpu", or "cuda" where there is one, got {settings.device!r}')
    for name in ("advertise", "advertise_via"):
        if getattr(settings, name):
            split_address(getattr(settings, name), name)
    Pace.parse(settings.pace)
    checkpoint.resolve(settings.model)
