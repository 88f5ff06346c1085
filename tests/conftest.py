"""What every test has: uvloop, a blocked event loop fails, and a settled machine."""

import asyncio
from collections.abc import Iterator

import pytest
import uvloop
from blockbuster import BlockBuster, blockbuster_ctx


@pytest.fixture(scope="session")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy()


@pytest.fixture(autouse=True)
def blocked_event_loop_fails() -> Iterator[BlockBuster]:
    with blockbuster_ctx(["kvrelay", "services"]) as guard:
        yield guard
