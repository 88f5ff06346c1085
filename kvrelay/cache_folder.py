"""Where files lie that can be made again: compiled kernels, converted weights. Knows folders, not their contents."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvrelay.settings import cache_home


def cache_folder(name: str, chosen: str = "") -> Path | None:
    """A folder that only this user can write, made if need be: in `chosen`, else in the user's cache. None: no such.

    Code and weights are trusted when they are read back, so a folder that others can write is not used.
    """
    parent = Path(chosen) if chosen else cache_home() / "kvrelay"
    return _owned(parent / name)


def temporary_folder(name: str) -> Path:
    """As cache_folder, below the system's temporary folder; a new one for this process if that is somebody else's."""
    found = _owned(Path(tempfile.gettempdir()) / f"kvrelay-{os.getuid()}" / name)
    return found or Path(tempfile.mkdtemp(prefix="kvrelay-"))


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """One process at a time, so that several that start together do not all make the same thing. Waits for its turn."""
    try:
        file = (folder / ".lock").open("w")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _owned(folder: Path) -> Path | None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):
        return None
    ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if ours and os.access(folder, os.W_OK | os.X_OK) else None
