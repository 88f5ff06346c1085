"""`python -m services.relay_decode --flags`."""

from kvrelay.settings import StageSettings
from kvrelay.stage.program import App, run


def load_app() -> App[StageSettings]:
    """Imports the wiring, and with it torch."""
    from services.relay_decode.app import relay_decode_app

    return relay_decode_app


if __name__ == "__main__":
    run("services.relay_decode", StageSettings, load_app)
