"""What every test has: uvloop; a blocked event loop fails; one torch thread (more spin on each other)."""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import grpc
import pytest
import uvloop
from blockbuster import BlockBuster, blockbuster_ctx

from kvrelay import fallbacks

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def grpc_poller() -> Iterator[None]:
    """gRPC's poller thread lives as long as the tests do.

    Else the last channel or server of a test ends it, joining its thread, whenever it happens to be collected: as
    likely as not inside a coroutine of ours, where that is a blocking call.
    """
    grpc.aio.init_grpc_aio()
    yield
    grpc.aio.shutdown_grpc_aio()


@pytest.fixture
def fallbacks_taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What this process counts as `kvrelay.fallbacks` during the test."""
    taken: Counter[str] = Counter()
    monkeypatch.setattr(fallbacks, "taken", taken)
    return taken


@pytest.fixture(autouse=True)
def blocked_event_loop_fails() -> Iterator[BlockBuster]:
    with blockbuster_ctx(["kvrelay", "services"]) as guard:
        yield guard
