"""README's command lines, run word for word as they stand there. Those with `docker` are run by test_compose.py."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.containers.shell import attempt, run
from tests.readme import ROOT, commands

BIN = Path(sys.executable).parent
ROUTER = "127.0.0.1:50050"
UP_S = 150.0


def test_every_command_line_of_the_readme_is_run_by_some_test() -> None:
    known = ("make demo", "make test", ".venv/bin/kvrelay ", ".venv/bin/grpcurl ", "docker compose ")
    assert [line for line in commands() if not line.startswith(known)] == []
    for beginning in known:
        assert commands(beginning), f"README shows no {beginning}"


@pytest.mark.parametrize("line", commands("make"))
def test_make_knows_the_targets(line: str) -> None:
    """Running them here would recurse; .ci/run runs both."""
    planned = run([*shlex.split(line), "--dry-run"], cwd=ROOT).stdout
    assert {"make demo": "kvrelay demo", "make test": "-m pytest"}[line] in planned


@pytest.mark.parametrize("name", ["kvrelay", *(line.split()[1] for line in commands(".venv/bin/kvrelay"))])
def test_help_fits_a_screen_and_leads_on(name: str) -> None:
    arguments = [] if name == "kvrelay" else [name]
    said = run([str(BIN / "kvrelay"), *arguments, "--help"], env={"COLUMNS": "80", "LINES": "24"}).stdout
    assert "Usage: kvrelay" in said
    assert max(len(line) for line in said.splitlines()) <= 80
    if name == "kvrelay":
        assert len(said.strip().splitlines()) <= 24
        assert "kvrelay up" in said and "kvrelay generate" in said


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which .venv/bin is this environment's, whatever it is called."""
    directory = tmp_path_factory.mktemp("readme")
    (directory / ".venv").mkdir()
    (directory / ".venv" / "bin").symlink_to(BIN)
    return directory


@pytest.fixture(scope="module")
def up(place: Path) -> Iterator[str]:
    """README's `kvrelay up`, left running; ends by Ctrl-C with exit code 0. Gives its line."""
    if not attempt([str(BIN / "kvrelay"), "health", ROUTER]).returncode:
        pytest.skip(f"something is served on {ROUTER} already")
    (line,) = (line for line in commands(".venv/bin/kvrelay") if line.split()[1] == "up")
    with subprocess.Popen(shlex.split(line), cwd=place, stdout=subprocess.PIPE, text=True) as process:
        with contextlib.ExitStack() as undo:
            undo.callback(process.kill)
            assert process.stdout is not None
            said = []
            for printed in process.stdout:
                said.append(printed)
                if "try: kvrelay generate" in printed:
                    break
            else:
                raise AssertionError("".join(said))
            yield line
            process.send_signal(signal.SIGINT)
            process.stdout.read()
            assert process.wait(30) == 0


@pytest.mark.slow
@pytest.mark.timeout(UP_S + 400)
@pytest.mark.parametrize("line", commands(".venv/bin/kvrelay", ".venv/bin/grpcurl"))
def test_the_command_line_works_as_it_stands(line: str, up: str, place: Path) -> None:
    if line == up:
        return
    done = run(shlex.split(line), cwd=place, env={"PATH": os.defpath}, limit_s=300)
    assert done.stdout.strip(), "it says something"
