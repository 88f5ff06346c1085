"""What every test has: uvloop; a blocked event loop fails; one torch thread, so that processes do not spin on each other."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping

import pytest
import uvloop
from blockbuster import BlockBuster, blockbuster_ctx

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def blocked_event_loop_fails() -> Iterator[BlockBuster]:
    with blockbuster_ctx(["kvrelay", "services"]) as guard:
        yield guard
