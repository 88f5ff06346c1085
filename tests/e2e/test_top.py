"""`kvrelay top` in a terminal of 80 columns, as a person sees it."""

import asyncio
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvrelay.cli.cluster import Cluster
from tests.e2e.asking import requests, under_way, whole
from tests.e2e.conftest import Router, program

pytestmark = pytest.mark.asyncio(loop_scope="session")

KVRELAY = Path(sys.executable).with_name("kvrelay")
LIMIT_S = 30.0


class Screen:
    """A tmux of its own with one window of 80 by 24."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def tmux(self, *arguments: str) -> str:
        """What it prints. Not through a pipe: the server that the first command leaves behind would keep it open."""
        with tempfile.TemporaryFile() as printed:
            process = await asyncio.create_subprocess_exec("tmux", "-L", self._name, *arguments, stdout=printed)
            await process.wait()
            printed.seek(0)
            return printed.read().decode()

    async def shows(self, *words: str, without: str = "\0") -> str:
        """What stands there, once all of `words` do and `without` does not."""
        text = ""
        try:
            async with asyncio.timeout(LIMIT_S):
                while without in text or not all(word in text for word in words):
                    await asyncio.sleep(0.2)
                    text = await self.tmux("capture-pane", "-p", "-t", "0")
        except TimeoutError:
            raise AssertionError(f"{words} are not all in:\n{text}") from None
        return text


@asynccontextmanager
async def screen(*command: str) -> AsyncIterator[Screen]:
    if not shutil.which("tmux"):
        pytest.skip("tmux is not installed")
    terminal = Screen(f"kvrelay-{uuid.uuid4().hex[:8]}")
    shell = f"{' '.join(command)}; echo ended with $?; sleep 60"
    await terminal.tmux("-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", shell)
    try:
        yield terminal
    finally:
        await terminal.tmux("kill-server")


async def test_top_shows_the_fleet_at_80_columns_and_goes_on_until_ctrl_c(town: Cluster, router: Router) -> None:
    salt = uuid.uuid4().hex
    async with screen(str(KVRELAY), "top", "--router", town.router_address, "--interval", "0.3") as terminal:
        await terminal.shows("policy pdd", "prefill-1", "relay-1", "main-1", "pool: used, cached")
        async with under_way(router, requests(salt, tokens=600), tokens=10) as flight:
            await flight.grew()
            await terminal.shows("4 in flight", "#", "prefill-1 → main-1")
            await flight.answers()
        text = await terminal.shows(
            "0 in flight", "P ", "MD ", "gap", "p-rld-md", "stall", "prefill-1 → main-1", "MB/s"
        )
        assert "hand-offs" in text and "fallbacks" in text
        assert "…" not in text, "nothing is cut off"
        assert len(text.rstrip().splitlines()) <= 24
        await terminal.tmux("send-keys", "-t", "0", "C-c")
        await terminal.shows("ended with 130")


async def test_top_says_why_when_the_router_is_gone_and_goes_on_when_it_is_back(town: Cluster, router: Router) -> None:
    async with screen(str(KVRELAY), "top", "--router", town.router_address, "--interval", "0.3") as terminal:
        await terminal.shows("policy pdd")
        await town.kill("router")
        try:
            await terminal.shows("UNAVAILABLE", "seen last", "main-1")
        finally:
            await town.restart("router")
        await terminal.shows("policy pdd", without="seen last")


async def test_into_a_pipe_top_prints_one_picture(town: Cluster, router: Router) -> None:
    await whole(router, requests(uuid.uuid4().hex, count=1, tokens=4))
    ran = await program("kvrelay", "top", "--router", town.router_address)
    assert ran.code == 0, ran.err
    assert "main-1" in ran.out and "pipelines" in ran.out
