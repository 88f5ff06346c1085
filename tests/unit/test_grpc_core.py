"""gRPC reads its switches when it is imported: they must be set by then."""

import os
import subprocess
import sys

import pytest

from kvrelay.grpc_core import WITHOUT_EVENT_ENGINE, read_in_place


def said(code: str, **environment: str) -> str:
    """What a fresh process prints."""
    plain = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=plain | environment,
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert "experiment" not in done.stderr  # gRPC complains of one that it does not know
    return done.stdout.strip()


SHOW = """
import os
from kvrelay.grpc_core import read_in_place
print(read_in_place(), os.environ["GRPC_EXPERIMENTS"])
import grpc
grpc.insecure_channel("127.0.0.1:1").close()
"""


def test_grpc_knows_the_switches_that_it_is_given() -> None:
    assert said(SHOW) == f"True {WITHOUT_EVENT_ENGINE}"


def test_what_the_environment_says_is_left_alone() -> None:
    assert said(SHOW, GRPC_EXPERIMENTS="") == "False"


def test_it_is_too_late_once_grpc_is_there() -> None:
    import grpc  # noqa: F401

    assert not read_in_place()


@pytest.mark.parametrize("program", ["router", "prefill", "relay_decode", "main_decode"])
def test_programs_tell_grpc_before_they_import_it(program: str) -> None:
    assert said(f"import services.{program}.__main__, sys; print('grpc' in sys.modules)") == "False"
