"""gRPC's poller thread lives as long as the tests do."""

from collections.abc import Iterator

import grpc
import pytest


@pytest.fixture(scope="session", autouse=True)
def grpc_poller() -> Iterator[None]:
    """Else the last channel or server of a test ends it, joining its thread, whenever it happens to be collected: as
    likely as not inside a coroutine of ours, where that is a blocking call.
    """
    grpc.aio.init_grpc_aio()
    yield
    grpc.aio.shutdown_grpc_aio()
