"""`python -m services.main_decode --flags`."""

from kvrelay.settings import StageSettings
from kvrelay.stage.program import run
from services.main_decode.app import main_decode_app

if __name__ == "__main__":
    run("services.main_decode", StageSettings, main_decode_app)
