"""Commands with a limit, whose output is shown when they fail. Knows no container."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = 120.0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs to the end; RuntimeError with the output's tail unless it succeeds, TimeoutExpired after `limit_s`."""
    done = attempt(command, env=env, limit_s=limit_s, cwd=cwd)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{tail}")
    return done


def attempt(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = 120.0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs to the end, whatever it says."""
    whole = {**os.environ, **(env or {})}
    return subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, env=whole, cwd=cwd)


def output(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = 120.0, cwd: Path | None = None
) -> str:
    """What a command that must succeed prints, without the last line's end."""
    return run(command, env=env, limit_s=limit_s, cwd=cwd).stdout.strip()
