"""`python -m services.prefill --flags`."""

from kvrelay.stage.program import App, run
from services.prefill.config import PrefillSettings


def load_app() -> App[PrefillSettings]:
    """Imports the wiring, and with it torch."""
    from services.prefill.app import prefill_app

    return prefill_app


if __name__ == "__main__":
    run("services.prefill", PrefillSettings, load_app)
