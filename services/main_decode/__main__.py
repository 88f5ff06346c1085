"""`python -m services.main_decode --flags`."""

from kvrelay.settings import StageSettings
from kvrelay.stage.program import App, run


def load_app() -> App[StageSettings]:
    """Imports the wiring, and with it torch."""
    from services.main_decode.app import main_decode_app

    return main_decode_app


if __name__ == "__main__":
    run("services.main_decode", StageSettings, load_app)
