"""The embedded Redis: starts, says why it cannot, and leaves nothing behind."""

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from kvrelay.index import server, store
from kvrelay.index.server import redis_server, start_redis


async def test_it_serves_without_eviction_and_ends_with_the_block(tmp_path: Path) -> None:
    async with redis_server(directory=tmp_path) as url:
        client = store.connect(url, timeout_s=5)
        assert await client.ping()
        assert (await client.config_get("maxmemory-policy"))["maxmemory-policy"] == "noeviction"
        await client.aclose()
        port = int(url.rpartition(":")[2].split("/")[0])
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", port)


async def test_an_error_of_the_body_passes_through_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with redis_server():
            raise KeyError("mine")


async def test_a_port_in_use_is_named_with_the_servers_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"redis-server on 127.0.0.1:{port} did not start: .*in use"):
            async with redis_server(port):
                pass


async def test_a_stopped_or_killed_server_is_no_obstacle_to_the_end() -> None:
    async with asyncio.timeout(10):
        async with start_redis() as one, start_redis() as two:
            one.send(signal.SIGSTOP)
            two.send(signal.SIGKILL)
            assert await two.ended() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(one.pid, 0)


def test_the_one_on_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert server.find_redis().name == "redis-server"
    own = tmp_path / "redis-server"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert server.find_redis() == own
