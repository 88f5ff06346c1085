"""The host's own wheels, served to builds: a container reads no directory of its host. Knows no package."""

import contextlib
import functools
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.containers.shell import attempt


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextlib.contextmanager
def served_wheels(python: str) -> Iterator[str]:
    """What PIP_FIND_LINKS is to be in a build on the host's network: URLs of the directories that pip uses here."""
    with contextlib.ExitStack() as stack:
        yield " ".join(stack.enter_context(_served(directory)) for directory in directories(python))


def directories(python: str) -> list[str]:
    """pip's find-links of this host, from its files and its environment."""
    listed = attempt([python, "-m", "pip", "config", "list"]).stdout.splitlines()
    values = [line.partition("=")[2].strip("'") for line in listed if line.partition("=")[0].endswith(".find-links")]
    return sorted({part for value in values for part in value.split() if Path(part).is_dir()})


@contextlib.contextmanager
def _served(directory: str) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=directory)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            thread.join()
