"""A real Redis for each test that asks for one."""

from collections.abc import AsyncIterator

import pytest

from kvrelay.index import store
from kvrelay.index.server import RedisServer, start_redis


@pytest.fixture
async def server() -> AsyncIterator[RedisServer]:
    async with start_redis() as server:
        yield server


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[store.Client]:
    """Looks at what the tested code wrote."""
    client = store.connect(server.url, timeout_s=5)
    yield client
    await client.aclose()
