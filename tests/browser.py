"""A real browser without a window, driven over its pipe: what it shows, says and asks for. Blocking."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
MISSING = "needs chromium: apt-get install chromium"
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--disable-sync",
    "--remote-debugging-pipe",
)  # fmt: skip


class Tab:
    """One page. `complaints`: errors and warnings of its console; `asked`: every URL that it wanted."""

    def __init__(self, write: BinaryIO, read: BinaryIO) -> None:
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self._write, self._read = write, read
        self._number = 0
        self._session = ""
        self._seen: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def show(self, path: Path, *, scheme: str = "light", width: int = 1200, height: int = 900) -> None:
        """Opens a file and waits until it is loaded. scheme: "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=features)
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._seen.clear()
        self._call("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self._seen:
            self._next()

    def value(self, expression: str) -> Any:
        """Of JavaScript."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def move(self, x: float, y: float) -> None:
        """The pointer, to a place in the window."""
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path) -> None:
        """Of the whole page, as PNG."""
        shot = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while (answer := self._next()).get("id") != self._number:
            continue
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._read.read(1)) != b"\0":
            assert byte, "the browser has ended"
            text += byte
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        self._seen.append(method)
        if method == "Network.requestWillBeSent":
            self.asked.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        elif method == "Log.entryAdded":
            self.complaints.append(str(params["entry"]))


@contextmanager
def browser() -> Iterator[Tab]:
    """A fresh one, ended at the end of the block."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out)]
    os.close(theirs_in), os.close(theirs_out)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        # The browser reads commands from descriptor 3 and writes to 4.
        command = ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", CHROMIUM, *FLAGS]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={home}"],
            pass_fds=theirs,
            env=os.environ | {"HOME": home},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in theirs:
            os.close(fd)
        with process, open(ours_out, "wb") as write, open(ours_in, "rb") as read:
            try:
                yield Tab(write, read)
            finally:
                process.kill()
