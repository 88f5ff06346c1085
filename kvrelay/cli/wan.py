"""`kvrelay wan`: the WAN emulator by itself; the same program as `python -m kvrelay.wan`."""

import os
import sys

import typer

from kvrelay.cli.console import out


def wan(context: typer.Context) -> None:
    """Run the WAN emulator. Flags: kvrelay wan -- --help."""
    out.file.flush()
    os.execv(sys.executable, [sys.executable, "-m", "kvrelay.wan", *context.args])
