"""`python -m services.prefill --flags`."""

from kvrelay.stage.program import run
from services.prefill.app import prefill_app
from services.prefill.config import PrefillSettings

if __name__ == "__main__":
    run("services.prefill", PrefillSettings, prefill_app)
