"""Where files lie that can be made again: compiled kernels, converted weights. Knows folders, not their contents."""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvrelay.fallbacks import fall_back
from kvrelay.settings import cache_home

log = logging.getLogger(__name__)

TURN_S = 120.0
"""How long one process waits for another to compile or convert: several times what that takes."""


def cache_folder(name: str, chosen: str = "") -> Path | None:
    """A folder that only this user can write, made if need be: in `chosen`, else in the user's cache. None: no such.

    Code and weights are trusted when they are read back, so a folder that others can write is not used.
    """
    parent = Path(chosen) if chosen else cache_home() / "kvrelay"
    folder = _owned(parent / name)
    if folder is None:
        fall_back(log, "no_cache_folder", "%s: not a folder that only this user can write: not used", parent / name)
    return folder


def temporary_folder(name: str) -> Path:
    """As cache_folder, below the system's temporary folder; a new one for this process if that is somebody else's."""
    found = _owned(Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}" / name)
    return found or Path(tempfile.mkdtemp(prefix="kvrelay-"))


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """One process at a time, so that several that start together do not all make the same thing.

    Whoever cannot have its turn within TURN_S, or cannot lock at all, goes on without: the work is done twice then.
    """
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        fall_back(log, "no_lock", "%s: no lock: %s", folder, error)
        yield
        return
    with file:
        _take_turn(file, folder)
        yield


def _take_turn(file: IO[str], folder: Path) -> None:
    until = time.monotonic() + TURN_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() > until:
                fall_back(log, "no_lock", "%s: not locked: %s", folder, error)
                return
        time.sleep(0.05)


def _owned(folder: Path) -> Path | None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        return None
    ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if ours and os.access(folder, os.W_OK | os.X_OK) else None
