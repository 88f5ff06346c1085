"""`python -m services.relay_decode --flags`."""

from kvrelay.settings import StageSettings
from kvrelay.stage.program import run
from services.relay_decode.app import relay_decode_app

if __name__ == "__main__":
    run("services.relay_decode", StageSettings, relay_decode_app)
